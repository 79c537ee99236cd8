"""The torch module of a layer: runs the layer's operator list, so counts and module come from one description.

Activations are packed rows [tokens, width]. A module called on a microbatch without tokens returns zero rows.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmplan.cost_models.layer import Layer
from mmplan.cost_models.ops import (
    Activation,
    Add,
    Attention,
    ClassToken,
    Conv1d,
    CrossEntropy,
    DropClassToken,
    Embedding,
    Interleave,
    Linear,
    MergeRows,
    Multiply,
    Norm,
    Op,
    Pool,
    Positions,
    Rope,
    op_inputs,
    op_trainable,
)
from mmplan.runtime import rows
from mmplan.runtime.attention import packed_attention, rotate, window_lengths
from mmplan.runtime.batch import Microbatch
from mmplan.runtime.norms import GroupedNorm

INITIAL_STD = 0.02  # of class tokens and positions (google-research/vision_transformer, `AddPositionEmbs`)

Blocks = tuple[Tensor, ...]  # rows in several pieces, see `packed_attention`


def build_layer(layer: Layer) -> nn.Module:
    """The module of a layer: `module(inputs by producer layer id, microbatch) -> [tokens, width]`, a loss a scalar.

    Weights have torch's default initialisation, adapters start as zero maps, frozen weights require no gradient. The
    weight of a tied head is `parts["head"].weight`, that of its table `parts["table"].weight`; whoever builds the
    model ties them.
    """
    return LayerModule(layer)


class LayerModule(nn.Module):
    """Interprets the operators of one layer; `parts` holds their parameters by operator name."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        parts = ((op, _part(op)) for op in layer.ops)
        self.parts = nn.ModuleDict({_name(op): part for op, part in parts if part is not None})
        for op in layer.ops:
            if _name(op) in self.parts:
                self.parts[_name(op)].requires_grad_(op_trainable(op))
        last_use = {value.name: step for step, op in enumerate(layer.ops) for value in op_inputs(op)}
        self._unused_after = [
            tuple(name for name, last in last_use.items() if last == step) for step in range(len(layer.ops))
        ]

    def forward(self, inputs: Mapping[str, Tensor], batch: Microbatch) -> Tensor:
        values: dict[str, Tensor | Blocks] = {source.value: inputs[source.producer] for source in self.layer.sources}
        if not self.layer.sources and self.layer.kind != "token_embed":
            values["raw"] = batch.inputs[self.layer.module]
        for op, unused in zip(self.layer.ops, self._unused_after, strict=True):
            values[op.y.name] = self._run(op, [values[value.name] for value in op_inputs(op)], batch)
            for name in unused:
                del values[name]
        return joined(values[self.layer.output.name])

    def _run(self, op: Op, inputs: Sequence[Tensor | Blocks], batch: Microbatch) -> Tensor | Blocks:
        """Result of one operator; linears and sums of blocks stay blocks."""
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
            case Attention():
                q, k, v = (joined(value) for value in inputs)
                return self._attend(op, q, k, v, batch)
            case Embedding():
                return self._run_part(op.name, batch.inputs[self.layer.module])
            case Interleave():
                parts = [joined(value) for value in inputs]
                return rows.interleave(parts, op.keys, batch.merge_positions[self.layer.module])
            case Multiply():
                return joined(inputs[0]) * joined(inputs[1])
            case _:
                return self._run_on_rows(op, joined(inputs[0]), batch)

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
                return F.silu(x) if op.kind == "silu" else F.gelu(x)
            case Rope():
                return rotate(x, lengths, op.heads)
            case Conv1d():
                return rows.convolve(x, self.parts[op.name], batch.raw_lengths[module])
            case ClassToken():
                pieces = rows.periods(x.shape[0], op.period, [length - 1 for length in lengths])
                return rows.prepend(x, self.parts[op.name].get_parameter("weight"), pieces)
            case DropClassToken():
                return rows.drop_first(x, rows.periods(x.shape[0], op.period, lengths))
            case Positions():
                return x + self._positions(op, x, lengths)
            case MergeRows():
                return rows.merge_rows(x, batch.context_lengths[module], op.merge)
            case Pool():
                return rows.pool_rows(x, lengths, op.size)
            case CrossEntropy():
                total = F.cross_entropy(x.float(), batch.labels[module], ignore_index=-100, reduction="sum")
                return total / max(1, batch.targets_in_batch[module])
            case _:
                raise ValueError(f"layer {self.layer.id}: no rule for {type(op).__name__}")

    def _attend(self, op: Attention, q: Tensor, k: Tensor, v: Tensor, batch: Microbatch) -> Blocks:
        lengths = batch.lengths[self.layer.module]
        if op.window is not None:
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
        )

    def _positions(self, op: Positions, x: Tensor, lengths: Sequence[int]) -> Tensor:
        if op.size == 0:
            longest = max(lengths, default=0)
            table = rows.sinusoids(longest, x.shape[1], x.dtype, x.device)
            return table.index_select(0, rows.row_positions(lengths, max(1, longest)).to(x.device))
        table = self.parts[op.name].get_parameter("weight")
        return table.index_select(0, rows.row_positions(lengths, op.size).to(x.device))


class Table(nn.Module):
    """One learned tensor."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape) * INITIAL_STD)


def joined(value: Tensor | Blocks) -> Tensor:
    """Blocks of rows as one tensor."""
    if isinstance(value, Tensor):
        return value
    return value[0] if len(value) == 1 else torch.cat(value)


def _name(op: Op) -> str:
    return op.name if isinstance(op, Linear | Conv1d | Norm | Embedding | ClassToken | Positions) else ""


def _part(op: Op) -> nn.Module | None:
    """The parameters of an operator; None when it has none."""
    match op:
        case Linear():
            linear = nn.Linear(op.x.width, op.y.width, bias=op.bias)
            if op.name.endswith("_b"):
                nn.init.zeros_(linear.weight)
            return linear
        case Conv1d():
            return nn.Conv1d(op.x.width, op.y.width, op.kernel, op.stride, padding=(op.kernel - 1) // 2)
        case Norm():
            return GroupedNorm(op.x.width, op.kind, op.groups)
        case Embedding():
            return nn.Embedding(op.size, op.y.width)
        case ClassToken():
            return Table(op.y.width)
        case Positions():
            return Table(op.size, op.y.width) if op.size else None
        case _:
            return None
