"""The torch module of a layer: runs the layer's operator list, so counts and module come from one description.

Activations are packed rows [tokens, width]. A module called on a microbatch without tokens returns zero rows.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmplan.cost_models.delta_ops import CausalConv, DeltaRule
from mmplan.cost_models.expert_ops import Combine, Dispatch, GroupedLinear, Route, TopK
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.ops import (
    Activation,
    Add,
    AddRows,
    Attention,
    ClassToken,
    Conv1d,
    Conv2d,
    CrossEntropy,
    DropClassToken,
    Embedding,
    Interleave,
    JoinHeads,
    Linear,
    MergeRows,
    Multiply,
    Norm,
    Op,
    Pool,
    Positions,
    Rope,
    Scale,
    Slice,
    Stored,
    op_inputs,
    op_trainable,
)
from mmplan.cost_models.rank_ops import SumParts
from mmplan.cost_models.values import split
from mmplan.runtime import experts, rows
from mmplan.runtime.attention import packed_attention, rotate, window_lengths
from mmplan.runtime.batch import Microbatch
from mmplan.runtime.delta_rule import causal_conv, delta_rule
from mmplan.runtime.dtypes import TORCH_DTYPES
from mmplan.runtime.norms import GroupedNorm
from mmplan.runtime.recompute import run_again

INITIAL_STD = 0.02  # of class tokens and positions (google-research/vision_transformer, `AddPositionEmbs`)
INITIAL_SCALE = 0.1  # of layer scales (arXiv 2103.17239, for shallow networks)

OnAttention = Callable[[Attention, Tensor, Tensor, Microbatch], None]  # sees queries and keys
Blocks = tuple[Tensor, ...]  # rows in several pieces, see `packed_attention`


def build_layer(layer: Layer) -> "LayerModule":
    """The module of a layer: `module(inputs by producer layer id, microbatch) -> [tokens, width]`, a loss a scalar.

    Weights have torch's default initialisation, adapters start as zero maps, frozen weights require no gradient. The
    weight of a tied head is `parts["head"].weight`, that of its table `parts["table"].weight`; whoever builds the
    model ties them.
    """
    return LayerModule(layer)


class LayerModule(nn.Module):
    """Interprets the operators of one layer; `parts` holds their parameters by operator name. With `drops_attention` it
    computes attention once more in its backward (arXiv 2205.05198, section 5), whose result then only others keep."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        parts = ((op, _part(op)) for op in layer.ops)
        self.parts = nn.ModuleDict({_name(op): part for op, part in parts if part is not None})
        for op in layer.ops:
            if _name(op) in self.parts:
                self.parts[_name(op)].requires_grad_(op_trainable(op))
        self.on_attention: OnAttention | None = None
        self.drops_attention = False
        self._dtype = None if layer.precision is None else TORCH_DTYPES[layer.precision]
        last_use = {value.name: step for step, op in enumerate(layer.ops) for value in op_inputs(op)}
        self._unused_after = [
            tuple(name for name, last in last_use.items() if last == step) for step in range(len(layer.ops))
        ]

    def as_own(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What other layers made, in the layer's own precision; gradients go back in theirs."""
        return inputs if self._dtype is None else {name: rows.to(self._dtype) for name, rows in inputs.items()}

    def forward(self, inputs: Mapping[str, Tensor], batch: Microbatch) -> Tensor:
        inputs = self.as_own(inputs)
        values: dict[str, Tensor | Blocks] = {source.value: inputs[source.producer] for source in self.layer.sources}
        if not self.layer.sources and self.layer.kind != "token_embed":
            values["raw"] = batch.inputs[self.layer.module]
        for op, unused in zip(self.layer.ops, self._unused_after, strict=True):
            run = self._run_again if self.drops_attention and isinstance(op, Attention | DeltaRule) else self._run
            values[op.y.name] = run(op, [values[value.name] for value in op_inputs(op)], batch)
            for name in unused:
                del values[name]
        return joined(values[self.layer.output.name])

    def _run_again(self, op: Op, inputs: Sequence[Tensor | Blocks], batch: Microbatch) -> Tensor | Blocks:
        watching = self.on_attention

        def run(*tensors: Tensor) -> Tensor | Blocks:
            nonlocal watching
            self.on_attention, seen = watching, self.on_attention
            watching = None  # who watches sees attention once
            try:
                return self._run(op, tensors, batch)
            finally:
                self.on_attention = seen

        return run_again(run, [joined(value) for value in inputs])

    def _run(self, op: Op, inputs: Sequence[Tensor | Blocks], batch: Microbatch) -> Tensor | Blocks:
        """Result of one operator; linears, sums and products of blocks stay blocks."""
        match op:
            case Linear():
                x = inputs[0]
                if isinstance(x, tuple):
                    return tuple(self._run_part(op.name, block) for block in x)
                return self._run_part(op.name, x)
            case Add():
                a, b = inputs
                if isinstance(a, tuple) and isinstance(b, tuple):
                    return tuple(x + y for x, y in zip(a, b, strict=True))
                return joined(a) + joined(b)
            case DeltaRule():
                decay, lengths = self.parts[op.name].get_parameter("weight"), batch.lengths[self.layer.module]
                q, k, v, gate, step = (joined(value) for value in inputs)
                return delta_rule(q, k, v, gate, step, decay, lengths, op.key_heads)
            case Attention():
                q, k, v = (joined(value) for value in inputs)
                return self._attend(op, q, k, v, batch)
            case Embedding():
                return self._run_part(op.name, batch.inputs[self.layer.module])
            case Interleave():
                parts = [joined(value) for value in inputs]
                return rows.interleave(parts, op.keys, batch.merge_positions[self.layer.module])
            case Multiply():
                a, b = inputs
                if isinstance(a, tuple):
                    pieces = torch.split(joined(b), [block.shape[0] for block in a])
                    return tuple(rows.multiply(x, y, op.groups) for x, y in zip(a, pieces, strict=True))
                return rows.multiply(a, joined(b), op.groups)
            case JoinHeads():
                return rows.join_heads(joined(inputs[0]), joined(inputs[1]), op.heads)
            case AddRows():
                a, b = (joined(value) for value in inputs)
                return rows.add_rows(a, b, batch.merge_positions[self.layer.module][op.key])
            case TopK() | Route() | Dispatch() | GroupedLinear() | Combine():
                return self._run_experts(op, [joined(value) for value in inputs])
            case _:
                return self._run_on_rows(op, joined(inputs[0]), batch)

    def _run_experts(self, op: Op, inputs: Sequence[Tensor]) -> Tensor:
        """Operators of a mixture of experts; all but the first read which experts were chosen."""
        match op:
            case TopK():
                return experts.top_experts(inputs[0], op.y.width)
            case Route():
                return experts.expert_weights(op.kind, inputs[0], inputs[1])
            case Dispatch():
                return experts.dispatch(inputs[0], inputs[1], op.experts, op.capacity)
            case GroupedLinear():
                x, chosen = inputs
                result: Tensor = self.parts[op.name](x, experts.rows_per_expert(chosen, op.experts, op.capacity))
                return result
            case Combine():
                x, chosen, weights = inputs
                return experts.combine(x, chosen, weights, op.experts, op.capacity)
            case _:
                raise ValueError(f"layer {self.layer.id}: no rule for {type(op).__name__}")

    def _run_part(self, name: str, x: Tensor) -> Tensor:
        result: Tensor = self.parts[name](x)
        return result

    def _run_on_rows(self, op: Op, x: Tensor, batch: Microbatch) -> Tensor:
        module = self.layer.module
        lengths = batch.lengths[module]
        match op:
            case Norm():
                return self._run_part(op.name, x)
            case Activation():
                return torch.sigmoid(x) if op.kind == "sigmoid" else F.silu(x) if op.kind == "silu" else F.gelu(x)
            case CausalConv():
                return causal_conv(x, self.parts[op.name].get_parameter("weight"), lengths)
            case Stored():
                return x + self.parts[op.name].get_parameter("weight").sum() * 0
            case Rope():
                return rotate(x, lengths, op.heads, op.dims)
            case Slice():
                return rows.take_columns(x, op.start, op.y.width, op.groups)
            case Scale():
                return x * self.parts[op.name].get_parameter("weight")
            case Conv1d():
                return rows.convolve(x, self.parts[op.name], batch.raw_lengths[module])
            case Conv2d():
                return rows.convolve_chunks(x, self.parts[op.name], op.frames, op.inputs)
            case ClassToken():
                pieces = rows.periods(x.shape[0], op.period, [length - 1 for length in lengths])
                return rows.prepend(x, self.parts[op.name].get_parameter("weight"), pieces)
            case DropClassToken():
                return rows.drop_first(x, rows.periods(x.shape[0], op.period, lengths))
            case Positions():
                return x + self._positions(op, x, lengths)
            case MergeRows():
                return rows.merge_rows(x, self._merged_lengths(batch), op.merge)
            case Pool():
                is_projector = self.layer.kind == "projector"
                return rows.pool_rows(x, batch.context_lengths[module] if is_projector else lengths, op.size)
            case CrossEntropy():
                total = F.cross_entropy(x.float(), batch.labels[module], ignore_index=-100, reduction="sum")
                return total / max(1, batch.targets_in_batch[module])
            case _:
                raise ValueError(f"layer {self.layer.id}: no rule for {type(op).__name__}")

    def _merged_lengths(self, batch: Microbatch) -> tuple[int, ...]:
        """Tokens of each sequence that a projector merges: those it reads, pooled."""
        sizes = [op.size for op in self.layer.ops if isinstance(op, Pool)]
        pool = sizes[0] if sizes else 1
        return tuple(length // pool for length in batch.context_lengths[self.layer.module])

    def _attend(self, op: Attention, q: Tensor, k: Tensor, v: Tensor, batch: Microbatch) -> Blocks:
        lengths = batch.lengths[self.layer.module]
        if self.on_attention is not None:
            self.on_attention(op, q, k, batch)
        if op.window is not None and not op.sliding:
            lengths = window_lengths(lengths, op.window)
        return packed_attention(
            q,
            k,
            v,
            query_lengths=lengths,
            key_lengths=batch.context_lengths[self.layer.module] if op.cross else lengths,
            heads=op.heads,
            kv_heads=op.kv_heads,
            causal=op.causal,
            sliding=op.window if op.sliding else None,
        )

    def _positions(self, op: Positions, x: Tensor, lengths: Sequence[int]) -> Tensor:
        if op.size == 0:
            longest = max(lengths, default=0)
            table = rows.sinusoids(longest, x.shape[1], x.dtype, x.device)
            return table.index_select(0, rows.row_positions(lengths, max(1, longest)).to(x.device))
        table = self.parts[op.name].get_parameter("weight")
        find = rows.stretched_positions if op.stretched else rows.row_positions
        return table.index_select(0, find(lengths, op.size).to(x.device))


class Table(nn.Module):
    """One learned tensor."""

    def __init__(self, *shape: int, value: float | None = None) -> None:
        super().__init__()
        initial = torch.randn(*shape) * INITIAL_STD if value is None else torch.full(shape, value)
        self.weight = nn.Parameter(initial)


def joined(value: Tensor | Blocks) -> Tensor:
    """Blocks of rows as one tensor."""
    if isinstance(value, Tensor):
        return value
    return value[0] if len(value) == 1 else torch.cat(value)


def _name(op: Op) -> str:
    match op:
        case Linear() | GroupedLinear() | Conv1d() | Norm() | Scale() | Embedding() | ClassToken() | Positions():
            return op.name
        case Conv2d() | Stored() | CausalConv() | DeltaRule():
            return op.name
        case SumParts():
            return op.name if op.bias else ""
        case _:
            return ""


def _part(op: Op) -> nn.Module | None:
    """The parameters of an operator; None when it has none."""
    match op:
        case Linear():
            linear = nn.Linear(op.x.width, op.y.local_width(), bias=op.bias)
            if op.name.endswith("_b"):
                nn.init.zeros_(linear.weight)
            return linear
        case Conv1d():
            return nn.Conv1d(op.x.width, op.y.width, op.kernel, op.stride, padding=(op.kernel - 1) // 2)
        case Conv2d():
            return nn.Conv2d(op.inputs, op.outputs, 3, 2, padding=1)
        case Norm():
            return GroupedNorm(op.x.width, op.kind, op.groups, op.bias)
        case CausalConv():
            return Table(op.x.width, op.kernel)
        case DeltaRule():
            return Table(2, op.value_heads)
        case Stored():
            return Table(op.size)
        case Embedding():
            return nn.Embedding(split(op.size, op.unit, 1), op.y.width)
        case GroupedLinear():
            return experts.ExpertLinear(op.experts, op.x.width, op.y.width)
        case Scale():
            return Table(op.y.width, value=INITIAL_SCALE)
        case ClassToken():
            return Table(op.y.width)
        case Positions():
            return Table(op.size, op.y.width) if op.size else None
        case SumParts():
            return Table(op.y.width, value=0.0) if op.bias else None
        case _:
            return None
