"""Process groups of a run: ranks that hold the same weights, that share layers, that send each other tensors."""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.degrees import copies_of_keys
from mmplan.cost_models.layout import Layout
from mmplan.planner.border import shard_of
from mmplan.planner.mesh import messages
from mmplan.planner.plan import Plan
from mmplan.planner.stage_graph import build_stage_graph
from mmplan.runtime.places import listed_places, place_of
from mmplan.runtime.tensor_sums import ExpertRanks, Peers, TensorRanks

# Rows of ranks -> the group of the row that holds this rank, None where rows are single ranks. Collective over all.
GroupOf = Callable[[np.ndarray], dist.ProcessGroup | None]


def peer_pairs(plan: Plan) -> set[tuple[int, int]]:
    """Ranks that send each other tensors: those of stages that the cut joins, partner by partner."""
    stages = build_stage_graph([stage.layers for stage in plan.stages], build_graph(plan.scenario))
    pairs = set()
    for cut in stages.cuts:
        border, ends = plan.border(cut.activation, cut.source, cut.target), (cut.source, cut.target)
        for way in (1, -1)[: 1 + cut.carries_grad]:
            (sending, giving), (getting, taking) = zip(ends[::way], border.seen[::way], strict=True)
            for (replica, shard), (partner, taker) in messages(giving, taking):
                sender = shard_of(shard, plan.mesh(sending), border.way)
                getter = shard_of(taker, plan.mesh(getting), border.way)
                pairs.add((plan.rank(sending, replica, sender), plan.rank(getting, partner, getter)))
    return {(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}


def _blocks(plan: Plan) -> Iterator[tuple[np.ndarray, Layout]]:
    """Of each mesh its ranks, `[pipeline rank, rank]`, and how a stage's ranks share its layers; the same on all."""
    for mesh in (plan.base, *plan.meshes):
        stages = [plan.stages_of(row)[0] for row in range(plan.pp)]
        own = [stage for stage in stages if plan.mesh(stage) == mesh]
        if own:
            yield np.array([plan.stage_ranks(stage) for stage in own]), plan.layout(own[0])


def replica_group(plan: Plan, rank: int, backend: str, timeout: timedelta) -> dist.ProcessGroup | None:
    """The ranks that hold the same weights, over dp and cp; None where there is one. Collective over all ranks."""
    own = None
    for ranks, layout in _blocks(plan):
        count = layout.dp * layout.cp
        if count > 1:
            holding = ranks.reshape(len(ranks), count, layout.tp).swapaxes(1, 2).reshape(-1, count)
            own = _own_group(holding, rank, backend, timeout) or own
    return own


def tensor_ranks(plan: Plan, rank: int, backend: str, timeout: timedelta) -> TensorRanks | None:
    """The ranks that share the layers of a stage: all in one replica, experts over all of them. None where each has
    them whole. Collective."""
    return tensor_ranks_of(plan, rank, lambda rows: _own_group(rows, rank, backend, timeout))


def tensor_ranks_of(plan: Plan, rank: int, own_group: GroupOf) -> TensorRanks | None:
    """The same, of any kind of groups, those of one rank too."""
    own, shard = None, place_of(plan, rank).shard if rank in listed_places(plan) else 0
    for ranks, layout in _blocks(plan):
        copies_of = copies_of_keys(plan.scenario.model, layout.tp)
        made = _tensor_ranks(ranks, layout, copies_of, rank, shard, own_group)
        own = made if rank in ranks else own
    if own is not None:
        own.context_parallel = plan.scenario.technique.context_parallel
        if own.degree > 1 and plan.scenario.technique.sequence_parallel:
            own.sequence = tuple(m.name for m in plan.scenario.model.modules if m.kind == "language_model")
    return own


def _tensor_ranks(
    ranks: np.ndarray, layout: Layout, copies_of: Sequence[int], rank: int, shard: int, own_group: GroupOf
) -> TensorRanks | None:
    """Those of one mesh; collective over all ranks of the plan. `copies_of`: ranks that hold a key head."""
    width = layout.cp * layout.tp
    if width == 1 and layout.ep == 1:
        return None
    group = own_group(ranks.reshape(-1, layout.tp))
    whole = group if layout.cp == 1 else own_group(ranks.reshape(-1, width))
    over_cp = ranks.reshape(-1, layout.cp, layout.tp).swapaxes(1, 2).reshape(-1, layout.cp)
    context = None if layout.cp == 1 else own_group(over_cp)
    experts = _expert_ranks(ranks, layout, rank, own_group) if layout.ep > 1 else None
    copies = {count: ranks.reshape(-1, layout.tp)[:, : layout.tp // count * count] for count in copies_of}
    return TensorRanks(
        degree=layout.tp,
        index=shard % layout.tp,
        group=group,
        experts=experts,
        context=None if context is None else Peers(layout.cp, shard // layout.tp, context),
        width=Peers(width, shard, whole),
        spread=layout.spread,
        patches=layout.patches,
        stage=own_group(ranks) if layout.spread else None,
        copies={count: own_group(part.reshape(-1, count)) for count, part in copies.items()},
    )


def _expert_ranks(ranks: np.ndarray, layout: Layout, rank: int, own_group: GroupOf) -> ExpertRanks:
    """Sets of experts lie one behind the other on the ranks of a stage, the parts of an expert side by side."""
    ranks = ranks.reshape(len(ranks), -1, layout.ep, layout.etp)
    sharing = own_group(ranks.swapaxes(2, 3).reshape(-1, layout.ep))
    holding = ranks.transpose(0, 2, 3, 1).reshape(-1, ranks.shape[1])
    (index,) = {int(place[2]) for place in np.argwhere(ranks == rank)} or {0}
    return ExpertRanks(
        degree=layout.ep,
        tp=layout.etp,
        index=index,
        group=sharing,
        replicas=own_group(holding) if ranks.shape[1] > 1 else None,
    )


def group_maker(rank: int, backend: str, timeout: timedelta) -> GroupOf:
    """Makes groups of this rank, beside those that every plan needs."""
    return lambda rows: _own_group(rows, rank, backend, timeout) if rows.shape[1] > 1 else None


def _own_group(rows: np.ndarray, rank: int, backend: str, timeout: timedelta) -> dist.ProcessGroup | None:
    """The group of the row that holds `rank`. Every rank makes all groups, in one order, as new_group demands."""
    own = None
    for ranks in rows.tolist():
        group = dist.new_group(ranks, backend=backend, timeout=timeout)
        own = group if rank in ranks else own
    return own
