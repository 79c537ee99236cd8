"""Which ranks do what together: a rank's place in the plan, and the process groups that follow from it."""

from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from mmplan.cost_models.build import build_graph
from mmplan.planner.plan import Plan
from mmplan.planner.program import RankProgram
from mmplan.planner.stage_graph import build_stage_graph
from mmplan.runtime.tensor_sums import ExpertRanks, Peers, TensorRanks


@dataclass(frozen=True, slots=True)
class Place:
    """Pipeline rank, replica, and place among the ranks that share the stage's layers."""

    row: int
    replica: int
    shard: int


def place_of(plan: Plan, rank: int) -> Place:
    """Ranks lie stage by stage, then replica by replica (see `Plan.rank`)."""
    listed, shard = divmod(rank, plan.width)
    return Place(*divmod(listed, plan.dp), shard)


def program_of_shard(program: RankProgram, shard: int) -> RankProgram:
    """The program of a rank beside the listed one: it does the same with the ranks beside the listed peers."""
    if shard == 0:
        return program
    actions = tuple(a if a.peer < 0 else replace(a, peer=a.peer + shard) for a in program.actions)
    return replace(program, rank=program.rank + shard, actions=actions)


def collapsed(program: RankProgram, width: int) -> RankProgram:
    """The program with one rank for the `width` that share a stage's layers: ranks and peers counted without others."""
    actions = tuple(replace(action, peer=action.peer // width) for action in program.actions)
    return replace(program, rank=program.rank // width, actions=actions)


def peer_pairs(plan: Plan) -> set[tuple[int, int]]:
    """Ranks that send each other tensors: those of stages that the cut joins, replica by replica."""
    stages = build_stage_graph([stage.layers for stage in plan.stages], build_graph(plan.scenario))
    pairs = {
        (plan.rank(cut.source, replica) + shard, plan.rank(cut.target, replica) + shard)
        for cut in stages.cuts
        for replica in range(plan.dp)
        for shard in range(plan.width)
    }
    return {(low, high) for low, high in pairs if low != high}


def replica_group(plan: Plan, rank: int, backend: str, timeout: timedelta) -> dist.ProcessGroup | None:
    """The ranks that hold the same weights, over dp and cp; None where there is one. Collective over all ranks."""
    count = plan.dp * plan.cp
    if count == 1:
        return None
    ranks = np.arange(plan.rank_count).reshape(plan.pp, count, plan.tp)
    return _own_group(ranks.swapaxes(1, 2).reshape(-1, count), rank, backend, timeout)


def tensor_ranks(plan: Plan, rank: int, backend: str, timeout: timedelta) -> TensorRanks | None:
    """The ranks that share the layers of a stage: all in one replica, experts over all of them. None where each has
    them whole. Collective."""
    if plan.width == 1 and plan.ep == 1:
        return None
    ranks = np.arange(plan.rank_count)
    group = _own_group(ranks.reshape(-1, plan.tp), rank, backend, timeout)
    width = group if plan.cp == 1 else _own_group(ranks.reshape(-1, plan.width), rank, backend, timeout)
    over_cp = ranks.reshape(-1, plan.cp, plan.tp).swapaxes(1, 2).reshape(-1, plan.cp)
    context = None if plan.cp == 1 else _own_group(over_cp, rank, backend, timeout)
    shard = place_of(plan, rank).shard
    experts = _expert_ranks(plan, rank, backend, timeout) if plan.ep > 1 else None
    holding = np.arange(plan.rank_count).reshape(plan.pp, -1)
    return TensorRanks(
        degree=plan.tp,
        index=shard % plan.tp,
        group=group,
        experts=experts,
        context=None if context is None else Peers(plan.cp, shard // plan.tp, context),
        width=Peers(plan.width, shard, width),
        spread=plan.spread,
        stage=_own_group(holding, rank, backend, timeout) if plan.spread else None,
    )


def _expert_ranks(plan: Plan, rank: int, backend: str, timeout: timedelta) -> ExpertRanks:
    """Sets of experts lie one behind the other on the ranks of a stage, the parts of an expert side by side."""
    ranks = np.arange(plan.rank_count).reshape(plan.pp, -1, plan.ep, plan.etp)
    sharing = _own_group(ranks.swapaxes(2, 3).reshape(-1, plan.ep), rank, backend, timeout)
    holding = ranks.transpose(0, 2, 3, 1).reshape(-1, ranks.shape[1])
    return ExpertRanks(
        degree=plan.ep,
        tp=plan.etp,
        index=int(np.argwhere(ranks == rank)[0][2]),
        group=sharing,
        replicas=_own_group(holding, rank, backend, timeout) if ranks.shape[1] > 1 else None,
    )


def _own_group(rows: np.ndarray, rank: int, backend: str, timeout: timedelta) -> dist.ProcessGroup | None:
    """The group of the row that holds `rank`. Every rank makes all groups, in one order, as new_group demands."""
    own = None
    for ranks in rows.tolist():
        group = dist.new_group(ranks, backend=backend, timeout=timeout)
        own = group if rank in ranks else own
    return own
