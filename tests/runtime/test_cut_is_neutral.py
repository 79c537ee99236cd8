"""A pipeline cut changes no bit: zones keep cuts away from layers for what is done at them, not for the cut itself."""

from collections.abc import Mapping

import pytest
import torch
from tiny_plans import hand_plan, tiny_scenario
from torch import Tensor

from mmplan.cost_models.build import build_graph
from mmplan.planner.plan import Plan
from mmplan.runtime.groups import place_of
from mmplan.runtime.stage import LayerStage
from mmplan.runtime.state import WholeState
from mmplan.runtime.train import build_stages, step_data, step_microbatches

CPU = torch.device("cpu")
LAYERS = [layer.id for layer in build_graph(tiny_scenario()).layers()]


def flat(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As a stage receives them: bytes."""
    return {name: tensor.contiguous().view(-1).view(torch.uint8) for name, tensor in tensors.items() if tensor.numel()}


def gradients(plan: Plan) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Losses and gradients of the first step, all stages in this process, one after the other."""
    graph, data = build_graph(plan.scenario), step_data(plan, 0)
    stages: list[LayerStage] = [build_stages(plan, graph, row, CPU)[row] for row in range(plan.pp)]
    for stage in stages:
        stage.load(step_microbatches(plan, data, place_of(plan, stage.stage), stage.raw_modules, CPU))
    for microbatch in range(2):
        sent: dict[str, Tensor] = {}
        for stage in stages:
            sent |= flat(
                stage.forward(microbatch, {name: sent[name] for name in stage.reads(gradients=False) if name in sent})
            )
        returned: dict[str, Tensor] = {}
        for stage in reversed(stages):
            own = {name: returned[name] for name in stage.reads(gradients=True) if name in returned}
            returned |= flat(stage.backward(microbatch, own))
    losses = {module: loss for stage in stages for module, loss in stage.losses().items()}
    found: dict[str, Tensor] = {}
    for stage in stages:
        assert isinstance(stage.state, WholeState)
        sums = stage.state._gradients
        for parameter, gradient in zip(sums.parameters, sums.views, strict=True):
            found[stage.places[parameter].name] = gradient
    return losses, found


@pytest.mark.parametrize("first", ["vision.1", "llm.2", "llm.head"])
def test_losses_and_gradients_of_a_cut_model_are_the_same_to_the_bit(first: str) -> None:
    """`first`: what the second stage begins with."""
    scenario, place = tiny_scenario(), LAYERS.index(first)
    whole_losses, whole = gradients(hand_plan(scenario, [LAYERS], microbatch_size=2))
    cut_losses, cut = gradients(hand_plan(scenario, [LAYERS[:place], LAYERS[place:]], microbatch_size=2))
    assert cut_losses == whole_losses
    assert cut.keys() == whole.keys()
    assert any(gradient.any() for gradient in whole.values())
    for name, gradient in whole.items():
        assert torch.equal(gradient, cut[name]), name
