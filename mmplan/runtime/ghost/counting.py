"""What pieces of a model cost, counted while a forward runs on tensors without storage: matrix products, attention,
numbers moved by everything else, and what autograd keeps.

Operators are seen below autograd, so code of any kind is counted by what it runs. Torch would take fused attention
apart on such tensors; it is counted as one call, which keeps its inputs, its result and one number of each row.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from mmplan.runtime.ghost.half_meta import META, any_routing
from mmplan.runtime.ghost.trials import fresh
from mmplan.scenario.recorded import BackwardSum, FusedAttention, Kept, Product, Reads, Weight

_MAKE = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "_local_scalar_dense"}
_PICK = {"embedding", "index", "index_select", "gather"}  # read as much as they write, not all of what they pick from


@dataclass(slots=True, eq=False)
class Count:
    """Of one piece in one forward; `kept` as in `RecordedKind`. `on_ranks`: by the degree of tensor parallelism, where
    ranks share the piece; `forward_sums`, `backward_sums`: of such a rank, as in `KindOnRank`."""

    products: list[Product] = field(default_factory=list)
    attentions: list[FusedAttention] = field(default_factory=list)
    moved: int = 0
    kernels: int = 0
    kept: Kept = field(default_factory=Kept)
    kept_frozen: Kept = field(default_factory=Kept)
    kept_first: Kept = field(default_factory=Kept)
    on_ranks: dict[int, "Count"] = field(default_factory=dict)
    forward_sums: tuple[int, ...] = ()
    backward_sums: tuple[BackwardSum, ...] = ()


class Shared(Protocol):
    """A unit as a rank has it that shares it with others (`shared_blocks.py`)."""

    @property
    def block(self) -> nn.Module: ...

    def forward_sums(self, linears: Mapping[str, tuple[int, int]]) -> tuple[int, ...]: ...

    def backward_sums(self, linears: Mapping[str, tuple[int, int]], made: set[int]) -> tuple[BackwardSum, ...]: ...


class Counting:
    """Counts for one model.

    Args:
        dtype: what its activations are made of.
        shared: by the degree of tensor parallelism, units of which a rank has a part.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, shared: Mapping[int, Mapping[str, Shared]] | None = None
    ) -> None:
        self._dtype, self._shared = dtype, {} if shared is None else shared
        blocks = (one.block for units in self._shared.values() for one in units.values())
        self._parameters = {storage_of(parameter): parameter for parameter in model.parameters()}
        self._parameters |= {storage_of(parameter): parameter for block in blocks for parameter in block.parameters()}
        self._glue = _Pass(self._trained(), dtype)
        self._before: frozenset[int] = frozenset()  # storages that glue in front of the next unit keeps

    @contextmanager
    def glue(self) -> Iterator[None]:
        """What runs inside and outside of units is counted until `take`."""
        with torch.enable_grad(), self._glue.keeping(), self._glue:
            yield

    def inside(self) -> AbstractContextManager[None]:
        """A unit runs, which is counted by itself."""
        return self._glue.paused()

    def take(self) -> Count:
        """What glue did since the last call. Its gradients reach outputs of units and weights alike."""
        self._before = self._glue.storages()
        return self._glue.take()

    def kept_before(self, args: Any, kwargs: Any) -> frozenset[int]:
        """Positions of arguments that glue keeps already."""
        leaves = enumerate(tree_leaves((args, kwargs)))
        return frozenset(i for i, leaf in leaves if isinstance(leaf, Tensor) and storage_of(leaf) in self._before)

    def entered(self, result: Any) -> Any:
        """A unit's result as what glue makes of it is differentiated by."""
        with self._glue.paused():
            return tree_map(_with_gradient, result)

    def form(self, name: str) -> tuple[int, ...]:
        """The same of units of one form that ranks share alike."""
        return tuple(id(units.get(name)) for units in self._shared.values())

    def unit(
        self,
        name: str,
        unit: nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        made: set[int],
        given: set[int],
        linears: Mapping[str, tuple[int, int]],
    ) -> Count:
        """One call, and as ranks that share the unit would make it.

        Args:
            made: positions of arguments that units or parameters have made; `given`: those that come from the batch.
            linears: elements that linear layers inside took and gave.
        """
        count = self._counted(unit, forward, args, kwargs, made, given)
        for degree, units in self._shared.items():
            own = units.get(name)
            if own is not None:
                on_rank = self._counted(own.block, own.block.forward, args, kwargs, made, given)
                on_rank.forward_sums = own.forward_sums(linears)
                on_rank.backward_sums = own.backward_sums(linears, made)
                count.on_ranks[degree] = on_rank
                pairs = (on_rank.products, count.products), (on_rank.attentions, count.attentions)
                assert all(len(part) == len(whole) for part, whole in pairs), f"{name} is other code on {degree} ranks"
        return count

    def _counted(
        self, unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, made: Set[int], given: Set[int]
    ) -> Count:
        """With gradients of inputs and weights, of inputs alone, and of weights alone."""
        leaves, spec = tree_flatten((args, kwargs))
        trained = [parameter for parameter in unit.parameters() if parameter.requires_grad]
        apart = {
            storage_of(leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i not in made | given
        }

        before = self.kept_before(args, kwargs)

        def run(*, inputs: bool, weights: bool) -> _Pass:
            own = [
                _with_gradient(leaf) if inputs and i in made else _without_gradient(leaf)
                for i, leaf in enumerate(leaves)
            ]
            seen = _Pass(self._trained(), self._dtype, apart | {storage_of(own[i]) for i in before})
            for parameter in trained:
                parameter.requires_grad_(weights)
            try:
                own_args, own_kwargs = tree_unflatten(own, spec)
                with torch.enable_grad(), any_routing(), _fused_attention(seen), seen.keeping(), seen:
                    forward(*own_args, **own_kwargs)
            finally:
                for parameter in trained:
                    parameter.requires_grad_(True)
            return seen

        with self._glue.paused():
            whole, frozen, first = (run(inputs=a, weights=b) for a, b in ((True, True), (True, False), (False, True)))
        count = whole.take()
        products = zip(count.products, frozen.count.products, first.count.products, strict=True)
        count.products = [
            replace(one, reads=_reads(inputs.operands > 0, weights.operands > 0)) for one, inputs, weights in products
        ]
        count.kept_frozen, count.kept_first = frozen.kept(), first.kept()
        return count

    def _trained(self) -> Mapping[int, bool]:
        return {storage: parameter.requires_grad for storage, parameter in self._parameters.items()}


class _Pass(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What one forward runs and keeps.

    Args:
        weights: storages of parameters -> whether they are trained.
        apart: storages of arguments that many units read, which no unit is charged with.
    """

    def __init__(self, weights: Mapping[int, bool], dtype: torch.dtype, apart: Set[int] = frozenset()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = Count()
        self._weights, self._dtype, self._apart = weights, dtype, apart
        self._kept: dict[int, Tensor] = {}  # storage -> a tensor, so that it lives and no other gets its place
        self._alive: list[Any] = []
        self._paused = False

    def take(self) -> Count:
        count, self.count = self.count, Count()
        count.kept = self.kept()
        count.kept_frozen = count.kept_first = count.kept
        self._kept.clear()
        return count

    def storages(self) -> frozenset[int]:
        """Of what is kept."""
        return frozenset(self._kept)

    def kept(self) -> Kept:
        own = [tensor for tensor in self._kept.values() if tensor.dtype == self._dtype]
        others = [tensor for tensor in self._kept.values() if tensor.dtype != self._dtype]
        numbers = sum(tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in own)
        return Kept(numbers=numbers, other_bytes=sum(tensor.untyped_storage().nbytes() for tensor in others))

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Tensors that autograd saves, but parameters, integers, and real ones: tables that all layers share."""

        def pack(tensor: Tensor) -> Tensor:
            known = storage_of(tensor)
            counts = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
            if (
                counts
                and not self._paused
                and tensor.device == META
                and known not in self._weights.keys() | self._apart
            ):
                self._kept.setdefault(known, tensor.detach())
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def attended(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> None:
        heads = query.shape[-3] if query.dim() > 3 else 1
        rows = math.prod(query.shape[:-1]) // heads
        one = FusedAttention(
            rows=rows,
            pairs=rows * key.shape[-2],
            heads=heads,
            head_dim=query.shape[-1],
            value_dim=value.shape[-1],
            causal=causal,
        )
        self.count.attentions.append(one)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._paused:
            self._see(
                func.overloadpacket.__name__, args, [x for x in tree_leaves((args, kwargs)) if _floats(x)], result
            )
        return result

    def _see(self, name: str, args: Sequence[Any], read: Sequence[Tensor], result: Any) -> None:
        made = [leaf for leaf in tree_leaves(result) if _floats(leaf)]
        self._alive += made
        if not made or name in _MAKE:
            return
        sizes = _product_sizes(name, args, made[0])
        if sizes is not None:
            operands, rows, inner, outer, groups = sizes
            weights = [self._weights[storage_of(one)] for one in operands if storage_of(one) in self._weights]
            others = [one for one in operands if storage_of(one) not in self._weights]
            weight: Weight = "none" if not weights else "trained" if any(weights) else "frozen"
            wanted = sum(one.requires_grad for one in others)
            self.count.products.append(
                Product(rows=rows, inner=inner, outer=outer, groups=groups, operands=wanted, weight=weight)
            )
            return
        views = {storage_of(one) for one in read}
        if all(storage_of(one) in views for one in made) and not name.endswith("_"):
            return
        written = sum(one.numel() for one in made)
        self.count.moved += 2 * written if name in _PICK else written + sum(one.numel() for one in read)
        self.count.kernels += 1


def _product_sizes(
    name: str, args: Sequence[Any], made: Tensor
) -> tuple[tuple[Tensor, Tensor], int, int, int, int] | None:
    """Operands, rows, inner and outer sizes and the number of matrix products in an operator; None for others."""
    match name:
        case "mm" | "bmm":
            a, b = args[0], args[1]
        case "addmm" | "baddbmm":
            a, b = args[1], args[2]
        case "mv":
            return (args[0], args[1]), args[0].shape[0], args[0].shape[1], 1, 1
        case "_grouped_mm":
            a, b = args[0], args[1]
            return (a, b), a.shape[0], a.shape[1], b.shape[-1], 1
        case "convolution":
            x, weight, groups = args[0], args[1], args[8]
            taps = math.prod(weight.shape[2:])
            if args[6]:  # transposed: each row of x gives several
                return (x, weight), x.numel() // x.shape[1], x.shape[1] // groups, weight.shape[1] * taps, groups
            return (x, weight), made.numel() // made.shape[1], weight.shape[1] * taps, weight.shape[0] // groups, groups
        case _:
            return None
    return (a, b), a.shape[-2], a.shape[-1], b.shape[-1], a.shape[0] if a.dim() == 3 else 1


class _Fused(torch.autograd.Function):
    """The shape of attention's result, and what its backward keeps; its layout is that of torch's kernels."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        shape = (*query.shape[:-1], value.shape[-1])
        swapped = len(shape) > 3
        order = (*shape[:-3], shape[-2], shape[-3], shape[-1]) if swapped else shape
        result = query.new_empty(order, device=META)
        result = result.transpose(-3, -2) if swapped else result
        statistics = query.new_empty(shape[:-1], dtype=torch.float32, device=META)
        ctx.save_for_backward(query, key, value, result, statistics)
        return result


@contextmanager
def _fused_attention(seen: _Pass) -> Iterator[None]:
    plain = F.scaled_dot_product_attention

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        *others: Any,
        is_causal: bool = False,
        **_: Any,
    ) -> Tensor:
        seen.attended(query, key, value, causal=is_causal or any(other is True for other in others[1:2]))
        made: Tensor = _Fused.apply(query, key, value)  # type: ignore[no-untyped-call]
        return made

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


def _reads(inputs: bool, weights: bool) -> Reads:
    return "both" if inputs and weights else "inputs" if inputs else "weights" if weights else "none"


def _with_gradient(value: Any) -> Any:
    """Floats as a tensor that has a gradient and may be written into."""
    return torch.empty_like(value, device=META).requires_grad_().clone() if _floats(value) else value


def _without_gradient(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else fresh(value)


def _floats(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.device == META


def storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
