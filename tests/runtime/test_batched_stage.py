"""What of layers that run several microbatches at once needs no processes: joined data, refusals, memory."""

from dataclasses import replace

import pytest
import torch
from tiny_plans import TWO_STAGES, hand_plan, tiny_scenario

from mmplan.errors import InputError
from mmplan.planner.plan import Plan
from mmplan.runtime.batch import joined, make_microbatch
from mmplan.runtime.ghost.refusals import refuse_plan
from mmplan.runtime.requirements import process_count
from mmplan.scenario.samples import draw_samples
from mmplan.scenario.scenario import Moe

VISION = ("vision", "projector")


@pytest.fixture
def plan() -> Plan:
    return replace(hand_plan(tiny_scenario(), TWO_STAGES), together=VISION, batch_factor=4)


def test_joined_microbatches_are_one_of_all_their_samples() -> None:
    scenario = tiny_scenario()
    samples = draw_samples(scenario.data, scenario.seed, 0, 6)

    def made(first: int, last: int) -> object:
        return make_microbatch(
            scenario,
            samples[first:last],
            indices=range(first, last),
            targets_in_batch={"llm": 10},
            raw_modules=("vision", "audio", "llm"),
            dtype=torch.float32,
            device=torch.device("cpu"),
        )

    parts, whole = [made(0, 2), made(2, 5), made(5, 6)], made(0, 6)
    one = joined(parts, (*VISION, "llm"))  # type: ignore[arg-type]
    for field in ("lengths", "raw_lengths", "context_lengths"):
        for name, lengths in getattr(one, field).items():
            assert lengths == getattr(whole, field)[name]
    assert set(one.lengths) == {*VISION, "llm"} and set(one.inputs) == {"vision", "llm"}
    assert all(torch.equal(rows, whole.inputs[name]) for name, rows in one.inputs.items())  # type: ignore[attr-defined]
    for source, rows in one.merge_positions["llm"].items():
        assert torch.equal(rows, whole.merge_positions["llm"][source])  # type: ignore[attr-defined]


def test_what_is_not_executed_so_is_refused_by_name(plan: Plan) -> None:
    assert process_count(plan, rehearse=False) == plan.rank_count
    with pytest.raises(InputError, match="a model of your own is executed on each alone"):
        refuse_plan(plan)
    dropping = Moe(experts=4, topk=1, expert_ffn=32, capacity_factor=1.0)
    modules = tuple(
        replace(module, transformer=replace(module.transformer, moe=dropping))
        if module.name == "vision" and module.transformer is not None
        else module
        for module in plan.scenario.model.modules
    )
    scenario = replace(plan.scenario, model=replace(plan.scenario.model, modules=modules))
    with pytest.raises(InputError, match=r"'vision' drops tokens .* and the plan runs 4 microbatches of it at once"):
        process_count(replace(plan, scenario=scenario), rehearse=False)
