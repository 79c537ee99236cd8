"""Parameters that several stages hold: tied tables, and what a model's glue reads in two places.

Each of these stages has a copy, and their ranks together sum its gradient, update it and keep its state, as replicas of
one stage do with what they hold. So copies stay equal to the bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from torch.nn import Parameter

from mmplan.errors import InputError
from mmplan.planner.plan import Plan
from mmplan.runtime.state import JointState, StageState, stage_state
from mmplan.scenario.scenario import Optimizer
from mmplan.scenario.technique import Sharding


@dataclass(frozen=True, kw_only=True, slots=True)
class Tie:
    """Parameters (by their names in the whole model) that the same stages hold."""

    names: tuple[str, ...]
    stages: tuple[int, ...]

    def leading(self, plan: Plan) -> tuple[int, ...]:
        """Of each pipeline rank that holds them the first stage, which has their state."""
        return tuple({plan.row(stage): stage for stage in reversed(self.stages)}.values())

    def ranks(self, plan: Plan) -> np.ndarray:
        """Those that hold the same of them, a row for each part: `[tp, ranks]`."""
        holders = [np.reshape(plan.stage_ranks(stage), (-1, plan.mesh(stage).tp)) for stage in self.leading(plan)]
        return np.concatenate(holders).T

    def writes(self, plan: Plan, stage: int, replica: int) -> bool:
        """Whether a rank writes to checkpoints what all of them hold alike."""
        return stage == self.stages[0] and replica == 0


def ties_of(plan: Plan, stages_of: Mapping[str, Sequence[int]]) -> tuple[Tie, ...]:
    """Args: stages_of: parameter -> stages that hold it.

    Raises:
        InputError: ranks with several stages would sum some of them in unlike orders.
    """
    by_stages: dict[tuple[int, ...], list[str]] = {}
    for name, stages in stages_of.items():
        if len(set(stages)) > 1:
            by_stages.setdefault(tuple(sorted(set(stages))), []).append(name)
    if len(by_stages) > 1 and plan.pp < len(plan.stages):
        (first, a), (second, b) = [(names[0], stages) for stages, names in sorted(by_stages.items())][:2]
        raise InputError(
            f"'{first}' is shared by stages {_listed(a)} and '{second}' by stages {_listed(b)}, and this release sums "
            "such gradients with one stage per rank only: take `constraints.vp` out of the scenario and optimize again"
        )
    return tuple(Tie(names=tuple(names), stages=stages) for stages, names in sorted(by_stages.items()))


def tied_sharding(sharding: Sharding) -> Sharding:
    """Stages are at unlike microbatches, so that what they share stays whole between updates."""
    return "none" if sharding == "none" else "optimizer"


def joined_state(
    rest: StageState,
    alone: Sequence[Parameter],
    tied: Sequence[tuple[Sequence[Parameter], dist.ProcessGroup | None]],
    optimizer: Optimizer,
    sharding: Sharding,
) -> StageState:
    """The state of a stage: of the parameters that it holds `alone`, and of those that each group holds with it."""
    if not tied:
        return rest
    parts = {rest: alone}
    for parameters, group in tied:
        parts[stage_state({"": parameters}, optimizer, tied_sharding(sharding), group)] = parameters
    return JointState(parts)


def _listed(stages: Sequence[int]) -> str:
    return " and ".join(map(str, stages))
