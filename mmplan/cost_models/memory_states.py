"""Weights, gradients and optimizer state of a rank under any sharding rule.

Dense parameters are split over the data-parallel ranks, those of experts over the ranks that hold the same experts:
with one such rank nothing of an expert's state is split (Megatron Core, `expert_data_parallel`).
"""

import math
from dataclasses import dataclass, replace

from mmplan.cost_models.counts import op_parameters
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.memory_estimate import MemoryPart
from mmplan.cost_models.memory_rules import memory_rules, parameter_bytes
from mmplan.cost_models.ops import Linear, Op, op_inputs, op_trainable
from mmplan.cost_models.shard import Shard
from mmplan.scenario.scenario import Dtype, Optimizer
from mmplan.scenario.technique import SHARDINGS, Technique


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCounts:
    """Parameters on one rank before any data-parallel sharding."""

    dense: int = 0
    dense_frozen: int = 0
    expert: int = 0
    expert_frozen: int = 0

    def __add__(self, other: "ParameterCounts") -> "ParameterCounts":
        return ParameterCounts(
            dense=self.dense + other.dense,
            dense_frozen=self.dense_frozen + other.dense_frozen,
            expert=self.expert + other.expert,
            expert_frozen=self.expert_frozen + other.expert_frozen,
        )

    @property
    def trained(self) -> int:
        return self.dense + self.expert

    @property
    def total(self) -> int:
        return self.trained + self.dense_frozen + self.expert_frozen


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """Over how many ranks state can be split: dense parameters (dp * cp) and experts."""

    dense: int
    expert: int


def is_expert(op: Op) -> bool:
    """Whether the operator's weights belong to routed experts."""
    return op.y.routed or any(value.routed for value in op_inputs(op))


def layer_counts(layer: Layer, shard: Shard, tied_here: bool = False) -> ParameterCounts:
    """Parameters of a layer on one rank; a tied head whose table is on the same rank (`tied_here`) adds none."""
    counts = {(expert, trained): 0 for expert in (False, True) for trained in (False, True)}
    for op in layer.ops:
        if tied_here and isinstance(op, Linear) and op.tied:
            continue
        count = op_parameters(op, shard)
        if count:
            counts[layer.has_experts and is_expert(op), op_trainable(op)] += count
    return ParameterCounts(
        dense=counts[False, True],
        dense_frozen=counts[False, False],
        expert=counts[True, True],
        expert_frozen=counts[True, False],
    )


def state_parts(
    counts: ParameterCounts, replicas: Replicas, precision: Dtype, optimizer: Optimizer, technique: Technique
) -> tuple[MemoryPart, ...]:
    """Weights, gradients and optimizer state on the device (arXiv 1910.02054, section 5: each ZeRO stage splits one
    more of them)."""
    per = parameter_bytes(precision, optimizer, technique)
    stage = SHARDINGS.index(technique.sharding)
    split_from = memory_rules(technique.stack).gradients_split_from
    on_host = ("none", "optimizer", "parameters").index(technique.host_states)
    frozen = counts.dense_frozen + counts.expert_frozen
    weights = split_bytes(counts, replicas, per.weight, stage >= 3)
    weights += math.ceil(frozen * per.frozen / (replicas.dense if stage >= 3 else 1))
    parts = [
        _part("weights", weights, counts, replicas, per.weight, stage >= 3, frozen, per.frozen),
        _part(
            "gradients",
            split_bytes(counts, replicas, per.gradient, stage >= split_from),
            counts,
            replicas,
            per.gradient,
            stage >= split_from,
        ),
        _part(
            "optimizer state",
            split_bytes(counts, replicas, per.optimizer, stage >= 1),
            counts,
            replicas,
            per.optimizer,
            stage >= 1,
        ),
    ]
    kept = parts[: 2 if on_host == 1 else 0 if on_host == 2 else 3]
    if technique.fp8 != "none":
        kept.append(_fp8_copies(counts, technique))
    return tuple(part for part in kept if part.bytes > 0)


def host_parts(
    counts: ParameterCounts, replicas: Replicas, precision: Dtype, optimizer: Optimizer, technique: Technique
) -> tuple[MemoryPart, ...]:
    """What offloading puts into (pinned) host memory, per rank (arXiv 2101.06840, section 3)."""
    if technique.host_states == "none":
        return ()
    per = parameter_bytes(precision, optimizer, technique)
    on_device = {
        part.name: part
        for part in state_parts(counts, replicas, precision, optimizer, replace(technique, offload="none"))
    }
    alone = technique.host_states == "optimizer"
    names = ("optimizer state",) if alone else ("weights", "gradients", "optimizer state")
    moved = [on_device[name] for name in names if name in on_device]
    copy = split_bytes(counts, replicas, per.gradient, True) if alone else 0
    pinned = MemoryPart(
        name="pinned gradient copy", bytes=copy, why=f"gradients of the offloaded shard: {copy:,} B", level="device"
    )
    return (*moved, *((pinned,) if copy else ()))


def split_bytes(counts: ParameterCounts, replicas: Replicas, per: int, sharded: bool) -> int:
    """`per` bytes for each trained parameter of a rank, spread over its replicas if `sharded`."""
    dense, expert = (replicas.dense, replicas.expert) if sharded else (1, 1)
    return math.ceil(counts.dense * per / dense) + math.ceil(counts.expert * per / expert)


def _part(
    name: str,
    size: int,
    counts: ParameterCounts,
    replicas: Replicas,
    per: int,
    sharded: bool,
    frozen: int = 0,
    frozen_bytes: int = 0,
) -> MemoryPart:
    terms = []
    for label, count, ranks in (("", counts.dense, replicas.dense), ("expert ", counts.expert, replicas.expert)):
        if count:
            terms.append(f"{label}{count:,} x {per} B" + (f" / {ranks}" if sharded and ranks > 1 else ""))
    if frozen:
        over = f" / {replicas.dense}" if sharded and replicas.dense > 1 else ""
        terms.append(f"frozen {frozen:,} x {frozen_bytes} B{over}")
    return MemoryPart(name=name, bytes=size, why=" + ".join(terms))


def _fp8_copies(counts: ParameterCounts, technique: Technique) -> MemoryPart:
    """FP8 weights and their transposes, kept from the first microbatch on (TransformerEngine `is_first_microbatch`)."""
    size = 2 * counts.trained
    return MemoryPart(name="FP8 weights", bytes=size, why=f"{counts.trained:,} x 2 B, {technique.fp8} scaling")
