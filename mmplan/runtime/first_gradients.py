"""The gradients of a run's first step, read off what it takes from the weights: whatever the plan does to gradients and
state on their way, this is what training gets.

A plan is run by plain gradient descent in fp32, with steps so long that rounding of the weights hides nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mmplan.planner.plan import Plan, scenario_hash
from mmplan.runtime.checkpoint.pieces import Piece, pieces_of
from mmplan.runtime.optimizer import WEIGHT
from mmplan.runtime.weighted_stage import WeightedStage
from mmplan.scenario.scenario import Optimizer

STEP_LENGTH = 2.0**20


def by_long_steps(plan: Plan) -> Plan:
    """The plan with such steps."""
    model = plan.scenario.model
    modules = tuple(replace(module, precision=None) for module in model.modules)
    scenario = replace(
        plan.scenario,
        precision="fp32",
        optimizer=Optimizer(name="sgd", learning_rate=STEP_LENGTH),
        model=replace(model, modules=modules),
    )
    return replace(plan, scenario=scenario, scenario_hash=scenario_hash(scenario))


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientPart:
    """A box of a parameter's gradient: where it begins in the whole parameter, and its values."""

    name: str
    offset: tuple[int, ...]
    values: Tensor


class FirstGradients:
    """Of a rank's stages, as they are before the first step."""

    def __init__(self, stages: Iterable[WeightedStage]) -> None:
        stages = tuple(stages)
        pieces = [piece for piece in pieces_of(stages) if WEIGHT in piece.tensors]
        self._before: list[tuple[Piece, Tensor]] = [(piece, piece.tensors[WEIGHT].clone()) for piece in pieces]
        self._trained = {stage.places[one.parameter].name for stage in stages for one in stage.state.trained()}

    def parts(self) -> list[GradientPart]:
        """By what the step took from the weights."""
        return [
            GradientPart(
                name=piece.name, offset=piece.box.offset, values=(before - piece.tensors[WEIGHT]).cpu() / STEP_LENGTH
            )
            for piece, before in self._before
        ]

    def save(self, path: Path) -> None:
        """Those, and which parameters are trained."""
        torch.save((self.parts(), self._trained), path)
