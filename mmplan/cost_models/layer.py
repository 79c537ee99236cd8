"""A layer: the smallest piece of a model that a pipeline stage can hold, with what is trained in it."""

from dataclasses import dataclass, field
from typing import Literal

from mmplan.cost_models.expert_ops import Dispatch, TopK
from mmplan.cost_models.ops import Op, op_inputs, op_trainable
from mmplan.cost_models.values import Value
from mmplan.scenario.scenario import Dtype, Modality

LayerKind = Literal[
    "patch_embed",
    "audio_embed",
    "block",
    "cross_block",
    "projector",
    "token_embed",
    "head",
    "loss",
    "unit",  # of a recorded model, no block
    "end",  # what a recorded model does behind its last unit, up to the loss
]


@dataclass(frozen=True, slots=True)
class Source:
    """The output of layer `producer` enters the operators under the name `value`."""

    producer: str
    value: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One node of the computation graph; the last operator's value is its output.

    `index` counts the blocks of a module (0 for other kinds). `grad_values` names the values that carry a gradient:
    inputs with a trainable layer upstream and everything computed from them or from trainable parameters.
    `whole_gradient`: what replicas sum of it may not be compressed. `no_fp8`: its products stay in 16 bit.
    `precision`: as of its module. `readers`: other modules that read its output; `placed`: as of its edge. `pieces`: of
    a recorded model, the modules and parameters that it is. `has_experts`: some rows are routed. `imbalance`: by how
    much longer than the mean the busiest rank works on rows of its experts (see `op_routed`). The hash is kept, as a
    search looks layers up a million times.
    """

    id: str
    module: str
    modality: Modality
    kind: LayerKind
    index: int
    sources: tuple[Source, ...]
    ops: tuple[Op, ...]
    grad_values: tuple[str, ...]
    whole_gradient: bool = False
    no_fp8: bool = False
    precision: Dtype | None = None
    readers: tuple[str, ...] = ()
    placed: bool = False
    pieces: tuple[str, ...] = field(default=(), compare=False)
    has_experts: bool = field(init=False, compare=False)
    imbalance: float = field(init=False, compare=False)
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        routed = any(value.routed for op in self.ops for value in (op.y, *op_inputs(op)))
        imbalance = max((op.imbalance for op in self.ops if isinstance(op, Dispatch)), default=1.0)
        object.__setattr__(self, "has_experts", routed)
        object.__setattr__(self, "imbalance", imbalance)
        object.__setattr__(self, "_hash", hash((self.id, self.ops, self.grad_values)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def shields(self) -> tuple[bool, bool]:
        """What its zones keep from it, of what a technique may have."""
        return self.whole_gradient, self.no_fp8

    @property
    def output(self) -> Value:
        return self.ops[-1].y

    @property
    def trainable(self) -> bool:
        """Some parameter of the layer is trained."""
        return any(op_trainable(op) for op in self.ops)

    @property
    def has_backward(self) -> bool:
        """The layer, or something upstream, is trained; equals "the output carries a gradient"."""
        return self.output.name in self.grad_values


def splits_rows(layer: Layer) -> bool:
    """Whether context parallelism splits the layer's rows."""
    return layer.modality in ("text", "speech")


def values_with_grad(ops: tuple[Op, ...], inputs_with_grad: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the values that carry a gradient, given those inputs that do, in the order they are computed."""
    grad = list(inputs_with_grad)
    for op in ops:
        reads_grad = any(value.name in grad for value in op_inputs(op))
        if (op_trainable(op) or reads_grad) and not isinstance(op, TopK):
            grad.append(op.y.name)
    return tuple(grad)
