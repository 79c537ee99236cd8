"""A layer of which each rank of a tensor-parallel group has the weights of its columns, and whole experts of its own.

Weights are slices of those that one process would have, so every degree starts from the same model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from mmplan.cost_models.expert_ops import GroupedLinear
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.layout import attention_way
from mmplan.cost_models.local_layer import local_layer, norm_of_heads, norms_over_heads
from mmplan.cost_models.ops import (
    AddRows,
    Attention,
    CrossEntropy,
    Embedding,
    Linear,
    MergeRows,
    Norm,
    Op,
    Pool,
    Rope,
    Scale,
)
from mmplan.cost_models.rank_ops import FromExperts, JoinRows, OwnRows, SumGradients, SumParts, ToExperts
from mmplan.cost_models.sequence_values import summed_weights, values_in_rows
from mmplan.cost_models.strided import strided
from mmplan.runtime.attention import window_lengths
from mmplan.runtime.batch import NO_LABEL, Microbatch
from mmplan.runtime.context import OwnRowsOf, rotate_own, rows_of, whole_states
from mmplan.runtime.exchange import Exchange, from_experts, join_rows, own_rows, plan_exchange, to_experts
from mmplan.runtime.experts import rows_per_expert
from mmplan.runtime.head_linears import HeadLinear
from mmplan.runtime.held import Place, whole_place
from mmplan.runtime.layers import Blocks, LayerModule, build_layer, joined
from mmplan.runtime.row_attention import Heads, own_attention, own_queries
from mmplan.runtime.row_heads import packed_to_heads, packed_to_rows
from mmplan.runtime.rows import add_rows
from mmplan.runtime.sequence_rows import (
    SequenceRows,
    WholeRows,
    cut_rows,
    linear_of_rows,
    sum_to_rows,
    whole_rows,
    with_summed_weights,
)
from mmplan.runtime.split_norm import split_rms_norm
from mmplan.runtime.strided_rows import averaged_rows, joined_rows
from mmplan.runtime.tensor_sums import TensorRanks, look_up, split_cross_entropy, sum_gradients, sum_parts


class SplitLayer(LayerModule):
    """Runs what `local_layer` lists; called like any layer, by all ranks of the group on the same inputs."""

    def __init__(self, layer: Layer, ranks: TensorRanks) -> None:
        self._shard = ranks.shard(layer)
        self._index = ranks.index if self._shard.tp > 1 else 0
        super().__init__(local_layer(layer, self._shard))
        self._whole, self._ranks = layer, ranks
        self._exchange: Exchange | None = None  # of the microbatch that is at work
        self._gathered: dict[str, tuple[WholeRows, Tensor]] = {}  # likewise, with the rank's rows
        self._in_rows = values_in_rows(layer, self._shard)
        self._summed = summed_weights(layer, self._shard)
        self._columns = {op.name: op for op in layer.ops if isinstance(op, Linear | Norm)}
        for name, op in self._columns.items():
            part, rest = self.parts[name], op.x.part(self._shard.tp, self._index)
            copies = op.y.copies(self._shard) if self._has_copies(name) else 1
            columns = op.x.local_width(self._shard) if rest is None else rest[1] - rest[0]
            if isinstance(part, nn.Linear) and (copies > 1 or columns < part.in_features):
                self.parts[name] = HeadLinear(part, ranks, copies=copies, columns=columns)

    def expert_parameters(self) -> list[nn.Parameter]:
        """Those that lie on other ranks than the rest of the layer."""
        if self._ranks.shard(self._whole).ep == 1:
            return []
        names = [op.name for op in self.layer.ops if isinstance(op, GroupedLinear)]
        return [parameter for name in names for parameter in self.parts[name].parameters()]

    def extent(self, name: str, whole: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where this rank's part of a parameter of the whole layer, of that shape, begins and ends."""
        ranks, experts, operator = self._ranks, self._ranks.experts, _operator(name)
        own = self.get_parameter(name).shape
        if self._is_of_experts(name) and experts is not None:
            index = [experts.index] + [ranks.index if experts.tp > 1 else 0] * (len(own) - 1)
        else:
            index = [ranks.index] * len(own)
        op = self._columns.get(operator)
        wide = operator in norms_over_heads(self._whole, self._shard)
        values = [op.y, op.x] if isinstance(op, Linear) else [op.x] if op is not None and wide else []
        offset = [0 if size == part else part * at for size, part, at in zip(whole, own, index, strict=True)]
        limit = list(whole)
        for dim, value in enumerate(values[: len(own)]):
            part = value.part(self._shard.tp, self._index)
            offset[dim], limit[dim] = part if part is not None else (offset[dim], limit[dim])
        return tuple(offset), tuple(limit)

    def copies(self, name: str) -> tuple[int, int]:
        """Of how many copies of the parameter on ranks that share the layer this is which: those of key heads."""
        op = self._columns.get(_operator(name))
        count = op.y.copies(self._shard) if isinstance(op, Linear) else 1
        return count, self._index % count if self._has_copies(_operator(name)) else 0

    def _has_copies(self, operator: str) -> bool:
        """Whether this rank has a head of an operator's of which others have copies."""
        op = self._columns.get(operator)
        if not isinstance(op, Linear) or op.y.heads is None or op.y.copies(self._shard) == 1:
            return False
        return self._index < op.y.heads.keys * op.y.copies(self._shard)

    def _is_of_experts(self, name: str) -> bool:
        return any(isinstance(op, GroupedLinear) and op.name == _operator(name) for op in self.layer.ops)

    def writes(self, name: str) -> bool | None:
        """Of an expert's parameter whether this rank is the first of those that have it; None of others."""
        if not self._is_of_experts(name) or self._ranks.experts is None:
            return None
        replicas = None if self._ranks.experts is None else self._ranks.experts.replicas
        return replicas is None or replicas.rank() == 0

    def summed_linears(self) -> list[nn.Linear]:
        """Of whose weights' gradients each tp rank has a part."""
        return [part for name, part in self.parts.items() if name in self._summed and isinstance(part, nn.Linear)]

    def forward(self, inputs: Mapping[str, Tensor], batch: Microbatch) -> Tensor:
        try:
            if self.layer.kind != "token_embed":
                return super().forward(inputs, batch)
            rows = super().forward(self._with_whole_states(self.as_own(inputs), batch), batch)
        finally:
            self._gathered = {}
        own = self._own(batch)
        rows = rows if own is None else own.take(rows)
        if self._ranks.shard(self._whole).sequence:
            rows = cut_rows(rows, self._sequence(batch, self.layer.module), self._ranks)
        return rows

    def _with_whole_states(self, inputs: Mapping[str, Tensor], batch: Microbatch) -> Mapping[str, Tensor]:
        """Of another language model's states each rank has its rows; its part of the sequence may need others."""
        whole, shard = dict(inputs), self._ranks.shard(self._whole)
        for name in inputs:
            module = name.rpartition(".")[0]
            if module not in batch.labels:
                continue
            if shard.sequence:
                whole[name] = whole_rows(whole[name], self._sequence(batch, module), self._ranks)
            if shard.cp > 1:
                peers = self._ranks.peers(self._whole)
                whole[name] = whole_states(whole[name], batch.lengths[module], self._ranks, peers)
        return whole

    def _sequence(self, batch: Microbatch, module: str) -> SequenceRows:
        """This rank's rows of a microbatch of a language model, where tp ranks have others."""
        lengths, ranks = batch.lengths[module], self._ranks
        own = None if ranks.shard(self._whole).cp == 1 else rows_of(lengths, ranks.peers(self._whole))
        return SequenceRows(sum(lengths) if own is None else 2 * own.size, ranks.degree, ranks.index, own)

    def _own(self, batch: Microbatch) -> OwnRowsOf | None:
        """This rank's rows of a microbatch where cp ranks have others."""
        if self._ranks.shard(self._whole).cp == 1:
            return None
        return rows_of(batch.lengths[self.layer.module], self._ranks.peers(self._whole))

    def _run_again(self, op: Op, inputs: Sequence[Tensor | Blocks], batch: Microbatch) -> Tensor | Blocks:
        way = attention_way(self._whole, self._ranks.context_parallel)
        if way == "gather" and self._own(batch) is not None and isinstance(op, Attention) and not op.cross:
            return self._run(op, inputs, batch)  # which does so itself, with the gathers
        return super()._run_again(op, inputs, batch)

    def _run(self, op: Op, inputs: Sequence[Tensor | Blocks], batch: Microbatch) -> Tensor | Blocks:
        own = self._own(batch)
        rows = self._sequence(batch, self.layer.module) if op.y.name in self._in_rows else own
        match op:
            case Rope() if rows is not None:
                return rotate_own(joined(inputs[0]), rows, batch.lengths[self.layer.module], op.heads, op.dims)
            case AddRows() if rows is not None:
                return self._add_own_rows(op, joined(inputs[0]), joined(inputs[1]), batch)
            case Attention() if own is not None:
                return self._attend_own_rows(op, [joined(value) for value in inputs], own, batch)
            case SumGradients() if op.rows:
                return self._gather(op, joined(inputs[0]), batch)
            case SumGradients():
                return sum_gradients(joined(inputs[0]), self._ranks)
            case SumParts():
                return self._sum(op, joined(inputs[0]), batch)
            case Linear() if op.trainable and op.x.name in self._gathered:
                gathered, of_rank = self._gathered[op.x.name]
                return linear_of_rows(self._linear(op.name), joined(inputs[0]), of_rank, gathered)
            case Scale() if op.name in self._summed:
                return joined(inputs[0]) * sum_gradients(self.parts[op.name].get_parameter("weight"), self._ranks)
            case Embedding() if self._ranks.degree > 1:
                ids = batch.inputs[self.layer.module]
                return look_up(ids, self.parts[op.name].get_parameter("weight"), self._ranks)
            case ToExperts() | FromExperts() | OwnRows() | JoinRows():
                return self._moved(op, [joined(value) for value in inputs], batch)
            case GroupedLinear() if self._exchange is not None:
                result: Tensor = self.parts[op.name](joined(inputs[0]), self._exchange.rows)
                return result
            case Pool() | MergeRows() if own is not None and strided(op, self._whole):
                return self._several_rows(op, joined(inputs[0]), batch)
            case CrossEntropy():
                labels = batch.labels[self.layer.module]
                return self._loss(joined(inputs[0]), labels if own is None else own.take(labels, NO_LABEL), batch)
            case _ if norm_of_heads(op) and self._ranks.shard(self._whole).tp > 1:
                return self._normed(op.name, joined(inputs[0]))
            case _:
                return super()._run(op, inputs, batch)

    def _run_part(self, name: str, x: Tensor) -> Tensor:
        if name in self._summed:
            return with_summed_weights(self.parts[name], (x,), self._ranks)
        return super()._run_part(name, x)

    def _linear(self, name: str) -> nn.Linear | HeadLinear:
        part = self.parts[name]
        assert isinstance(part, nn.Linear | HeadLinear)
        return part

    def _gather(self, op: SumGradients, own: Tensor, batch: Microbatch) -> Tensor:
        readers = sum(
            isinstance(other, Linear) and other.trainable and other.x.name == op.y.name for other in self.layer.ops
        )
        whole = WholeRows(self._sequence(batch, self.layer.module), self._ranks, readers)
        self._gathered[op.y.name] = whole, own
        return whole.of(own)

    def _sum(self, op: SumParts, parts: Tensor, batch: Microbatch) -> Tensor:
        bias = self.parts[op.name].get_parameter("weight") if op.bias else None
        if not op.rows:
            total = sum_parts(parts, self._ranks)
            return total if bias is None else total + bias
        total = sum_to_rows(parts, self._sequence(batch, self.layer.module), self._ranks)
        return total if bias is None else total + sum_gradients(bias, self._ranks)

    def _moved(
        self, op: ToExperts | FromExperts | OwnRows | JoinRows, inputs: Sequence[Tensor], batch: Microbatch
    ) -> Tensor:
        x = inputs[0]
        match op:
            case ToExperts():
                assert self._ranks.experts is not None
                counts = rows_per_expert(inputs[1], op.experts, op.capacity)
                self._exchange = plan_exchange(counts, self._ranks.experts, x.device)
                return to_experts(x, self._exchange, self._ranks)
            case FromExperts():
                assert self._exchange is not None
                return from_experts(x, self._exchange, self._ranks)
            case OwnRows():
                return own_rows(x, self._ranks)
            case JoinRows():
                own = self._own(batch)
                rows = sum(batch.lengths[self.layer.module]) if own is None else 2 * own.size
                return join_rows(x, rows, self._ranks)

    def _add_own_rows(self, op: AddRows, a: Tensor, b: Tensor, batch: Microbatch) -> Tensor:
        at, own = batch.merge_positions[self.layer.module][op.key], self._own(batch)
        if own is not None:
            mine, at = own.among(at)
            b = b.index_select(0, mine)
        if op.y.name not in self._in_rows:
            return add_rows(a, b, at)
        rows = self._sequence(batch, self.layer.module)
        return a + cut_rows(add_rows(a.new_zeros(rows.count, a.shape[1]), b, at), rows, self._ranks)

    def _several_rows(self, op: Pool | MergeRows, x: Tensor, batch: Microbatch) -> Tensor:
        of = batch.context_lengths if self.layer.kind == "projector" else batch.lengths
        lengths, peers = of[self.layer.module], self._ranks.peers(self._whole)
        if isinstance(op, Pool):
            return averaged_rows(x, lengths, op.size, self._ranks, peers)
        return joined_rows(x, lengths, op.merge, self._ranks, peers)

    def _attend_own_rows(self, op: Attention, inputs: Sequence[Tensor], own: OwnRowsOf, batch: Microbatch) -> Tensor:
        lengths, (q, k, v) = batch.lengths[self.layer.module], inputs
        sliding = op.window if op.sliding else None
        heads = Heads(queries=op.heads, keys=op.kv_heads, causal=op.causal, sliding=sliding)
        if op.cross:
            context = batch.context_lengths[self.layer.module]
            return own_queries(q, k, v, own, lengths=lengths, key_lengths=context, heads=heads)
        way = attention_way(self._whole, self._ranks.context_parallel)
        if way == "all-to-all" and own.count:
            return self._attend_by_heads(op, inputs, own, batch)
        if op.window is not None and not op.sliding:
            lengths = window_lengths(lengths, op.window)
        peers = self._ranks.peers(self._whole)
        return own_attention((q, k, v), own, self._ranks, peers, lengths=lengths, heads=heads, way=way)

    def _attend_by_heads(self, op: Attention, inputs: Sequence[Tensor], own: OwnRowsOf, batch: Microbatch) -> Tensor:
        """All rows of some of the heads, for which the rank gives others its rows of theirs."""
        peers, counts = self._ranks.peers(self._whole), (op.heads, op.kv_heads, op.kv_heads)
        q, k, v = packed_to_heads(inputs, counts, own, self._ranks, peers)
        few = replace(op, heads=op.heads // peers.degree, kv_heads=op.kv_heads // peers.degree)
        return packed_to_rows(joined(self._attend(few, q, k, v, batch)), few.heads, own, self._ranks, peers)

    def _loss(self, logits: Tensor, labels: Tensor, batch: Microbatch) -> Tensor:
        module = self.layer.module
        size = next(op.x.local_width() for op in self._whole.ops if isinstance(op, CrossEntropy))
        if self._ranks.degree == 1:
            total = F.cross_entropy(logits.float(), labels, ignore_index=NO_LABEL, reduction="sum")
        else:
            total = split_cross_entropy(logits, labels, size, self._ranks)
        return total / max(1, batch.targets_in_batch[module])

    def _normed(self, name: str, x: Tensor) -> Tensor:
        """Of a norm of each head every rank's heads have a part of the gradients of the one scale (and shift)."""
        norm, over_heads = self.parts[name], norms_over_heads(self._whole, self._shard)
        if name in over_heads:
            return split_rms_norm(x, norm.get_parameter("weight"), over_heads[name], self._ranks)
        if x.shape[0] == 0:
            return x
        shared = {name: sum_gradients(value, self._ranks) for name, value in norm.named_parameters()}
        result: Tensor = torch.func.functional_call(norm, shared, (x,))
        return result


def split_layer(whole: LayerModule, ranks: TensorRanks) -> SplitLayer:
    """This rank's part of a layer, with the weights of the whole one.

    Columns beyond the last whole one (padded heads, padded vocabulary) have zeros, and get no gradient: attention of
    a head without values is zero, and the loss leaves out logits that do not exist.
    """
    split = SplitLayer(whole.layer, ranks)
    weights = dict(whole.parts.named_parameters())
    for name, parameter in split.parts.named_parameters():
        own = weights[name_in_whole(name)].detach()
        parameter.data = slice_of(own, parameter.shape, *split.extent(f"parts.{name}", own.shape))
    return split


def _operator(name: str) -> str:
    """Of a parameter of a layer."""
    return name.removeprefix("parts.").split(".")[0]


def name_in_whole(name: str) -> str:
    """A parameter's name in the whole layer: what is added behind a sum there is the bias of the product before it."""
    return f"{name.removesuffix('_sum.weight')}.bias" if name.endswith("_sum.weight") else name


def places_of(module: nn.Module, layer: Layer) -> dict[Parameter, Place]:
    """Where the parameters of a layer's module lie in those of the whole layer, named `layer id/name`."""
    own = list(module.named_parameters())
    if not isinstance(module, SplitLayer):
        return {parameter: whole_place(f"{layer.id}/{name}", parameter) for name, parameter in own}
    with torch.device("meta"):
        whole = dict(build_layer(layer).named_parameters())
    places = {}
    for name, parameter in own:
        shape, (copies, copy) = tuple(whole[name_in_whole(name)].shape), module.copies(name)
        offset, limit = module.extent(name, shape)
        places[parameter] = Place(
            name=f"{layer.id}/{name_in_whole(name)}",
            shape=shape,
            offset=offset,
            limit=limit,
            writes=module.writes(name),
            repeated=copy > 0,
            sharers=copies,
        )
    return places


def slice_of(whole: Tensor, shape: Sequence[int], offset: Sequence[int], limit: Sequence[int]) -> Tensor:
    """The part of a tensor that has the shape and begins there; zeros beyond the limit."""
    part = whole
    for dim, (size, first, end) in enumerate(zip(shape, offset, limit, strict=True)):
        begin = min(first, end)
        part = part.narrow(dim, begin, min(size, end - begin))
    result = whole.new_zeros(shape)
    result[tuple(slice(0, size) for size in part.shape)] = part
    return result
