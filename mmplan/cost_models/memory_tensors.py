"""The largest single tensors of a rank, with shape and bytes: what an out-of-memory message would name."""

from collections.abc import Iterable, Mapping, Sequence

from mmplan.cost_models.counts import FP32_BYTES, saved_values
from mmplan.cost_models.expert_ops import GroupedLinear
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.load import Load
from mmplan.cost_models.memory_activations import Setting
from mmplan.cost_models.memory_estimate import LargeTensor
from mmplan.cost_models.ops import Attention, CrossEntropy, Embedding, Linear
from mmplan.cost_models.values import row_fraction, split
from mmplan.scenario.scenario import DTYPE_BYTES


def largest_tensors(
    layers: Sequence[Layer], loads: Mapping[str, Load], settings: Mapping[str, Setting], count: int = 5
) -> tuple[LargeTensor, ...]:
    """The `count` largest tensors of one microbatch and of the weights; equal ones of several layers stand once."""
    found: dict[tuple[str, tuple[int, ...]], LargeTensor] = {}
    for layer in layers:
        for tensor in _tensors(layer, loads[layer.module], settings[layer.module]):
            found.setdefault((tensor.name.rpartition(" ")[2], tensor.shape), tensor)
    return tuple(sorted(found.values(), key=lambda tensor: -tensor.bytes)[:count])


def _tensors(layer: Layer, load: Load, setting: Setting) -> Iterable[LargeTensor]:
    width, dtype, shard = DTYPE_BYTES[setting.precision], setting.precision, setting.shard
    for op in layer.ops:
        match op:
            case Linear():
                shape: tuple[int, ...] = (op.y.local_width(shard), op.x.local_width(shard))
                yield _tensor(f"{layer.id} weight {op.name}", shape, dtype, width)
            case GroupedLinear():
                shape = (split(op.experts, 1, shard.ep), op.x.local_width(shard), op.y.local_width(shard))
                yield _tensor(f"{layer.id} experts {op.name}", shape, dtype, width)
            case Embedding():
                yield _tensor(f"{layer.id} {op.name}", (split(op.size, op.unit, shard.tp), op.y.width), dtype, width)
            case CrossEntropy():
                shape = (round(op.x.local_rows(load, shard)), op.x.local_width(shard))
                yield _tensor(f"{layer.id} fp32 logits", shape, "fp32", FP32_BYTES)
            case Attention() if setting.technique.attention == "math":
                heads = op.q.local_width(shard) // op.head_dim
                pairs = round(op.pairs.of(load) * row_fraction(False, shard))
                yield _tensor(f"{layer.id} attention scores", (heads, pairs), dtype, width)
            case _:
                pass
        for value in saved_values(layer, op):
            shape = (round(value.local_rows(load, shard)), value.local_width(shard))
            yield _tensor(f"{layer.id} activation {value.name}", shape, dtype, width)


def _tensor(name: str, shape: tuple[int, ...], dtype: str, width: int) -> LargeTensor:
    size = width
    for dim in shape:
        size *= dim
    return LargeTensor(name=name, shape=shape, dtype=dtype, bytes=size)
