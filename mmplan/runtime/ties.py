"""Parameters that several stages hold: tied tables, and what a model's glue reads in two places.

Each of these stages has a copy, whose state it keeps with its replicas like all else. Between the reduction and the
update the ranks of a replica that have a copy sum what each has of the gradient: all of it, or the share that is its
own where replicas share out gradients or state; so copies, which start equal, stay equal to the bit. Ranks come to all
sums in one order, behind all their reductions, so that none waits for another in a circle.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.ties import tied_layers
from mmplan.planner.plan import Plan
from mmplan.runtime.groups import GroupOf
from mmplan.runtime.held import Place
from mmplan.runtime.network import all_reduce
from mmplan.runtime.weighted_stage import WeightedStage
from mmplan.scenario.technique import Sharding


@dataclass(frozen=True, kw_only=True, slots=True)
class Tie:
    """Parameters (by their names in the whole model) that the same stages hold; of a built-in model one, by the layers
    that read it, the token table first."""

    names: tuple[str, ...]
    stages: tuple[int, ...]
    trained: bool = True

    def leading(self, plan: Plan) -> tuple[int, ...]:
        """Of each pipeline rank that holds them the first stage."""
        return tuple({plan.row(stage): stage for stage in reversed(self.stages)}.values())

    def ranks(self, plan: Plan) -> np.ndarray:
        """Those that sum, `[replica and shard, pipeline ranks that hold it]`."""
        return np.array([plan.stage_ranks(stage) for stage in sorted(self.leading(plan))]).T


class TieSum:
    """One sum of one rank. Args: shares: of each of its stages that hold the parameters, live; group: the ranks of the
    replica that hold them too, None where there is none."""

    def __init__(self, shares: Sequence[Sequence[Tensor]], group: dist.ProcessGroup | None) -> None:
        self._shares, self._group = shares, group

    def run(self) -> int:
        """In place; returns the bytes handed to the sum. Collective over the group."""
        first, *others = self._shares
        for other in others:
            for own, more in zip(first, other, strict=True):
                own.add_(more)
        for own in first if self._group is not None else ():
            all_reduce(own, self._group)
        for other in others:
            for own, more in zip(first, other, strict=True):
                more.copy_(own)
        return 0 if self._group is None else sum(own.nbytes for own in first)


def plan_ties(plan: Plan, graph: ComputationGraph) -> tuple[Tie, ...]:
    """Those of a built-in model, trained ones first, in the order of the program."""
    stage_of, ties = plan.stage_of_layer(), list[Tie]()
    for pair in tied_layers(graph):
        if stage_of[pair[0]] != stage_of[pair[1]]:
            stages = tuple(stage_of[layer] for layer in pair)
            ties.append(Tie(names=pair, stages=stages, trained=graph.layer(pair[1]).trainable))
    return tuple(sorted(ties, key=lambda tie: not tie.trained))


def ties_of(stages_of: Mapping[str, Sequence[int]], trained: Set[str]) -> tuple[Tie, ...]:
    """Those of trained parameters, then those of frozen ones. Args: stages_of: parameter -> stages that hold it."""
    alike: dict[tuple[bool, tuple[int, ...]], list[str]] = {}
    for name, stages in stages_of.items():
        if len(set(stages)) > 1:
            alike.setdefault((name not in trained, tuple(sorted(set(stages)))), []).append(name)
    return tuple(
        Tie(names=tuple(names), stages=stages, trained=not frozen) for (frozen, stages), names in sorted(alike.items())
    )


def tied_sharding(sharding: Sharding) -> Sharding:
    """Of a model whose stages on one rank share parameters: these stay whole between updates."""
    return "none" if sharding == "none" else "optimizer"


def join(
    plan: Plan,
    ties: Sequence[Tie],
    stages: Mapping[int, WeightedStage],
    parameters: Callable[[int, Tie], Sequence[Parameter]],
    more: GroupOf,
) -> None:
    """Let the stages of a rank sum what they hold with others. Collective over all ranks.

    Args:
        stages: of this rank.
        parameters: of a tie those whose state a stage keeps.
        more: makes groups.
    """
    for number, tie in enumerate(tie for tie in ties if tie.trained):
        group = more(tie.ranks(plan))
        held = [stage for stage in tie.stages if stage in stages]
        shares = [stages[stage].state.summed(own) for stage in held if (own := parameters(stage, tie))]
        if shares:
            stages[held[0]].ties[number] = TieSum(shares, group).run


def copy_place(place: Place, tie: Tie, *, first: bool) -> Place:
    """Of a stage's copy; the first stage that has one writes it."""
    place = replace(place, copies=len(tie.stages))
    return place if first else replace(place, writes=False, repeated=True)
