"""Orders for torch's pipelining where stages are no chain."""

from random_plans import random_plan

from mmplan.planner.formats.torch_pipelining import export_torch_pipelining
from mmplan.planner.plan import Plan
from mmplan.planner.schedules.text import parse_schedule_csv


def side_by_side() -> Plan:
    """Two encoders on stages of their own in front of the language model."""

    def apart(plan: Plan) -> bool:
        held = [{layer.partition(".")[0] for layer in stage.layers} for stage in plan.stages]
        return len(held) > 2 and any("vision" in h and "audio" not in h for h in held) and not plan.placement

    return next(plan for plan in (random_plan(seed, ("tiny",)) for seed in range(400)) if apart(plan))


def test_parallel_encoders_are_put_in_a_row_with_the_price() -> None:
    made = export_torch_pipelining(side_by_side())
    told = [loss for loss in made.losses if "runs chains" in loss.sentence]
    assert all(loss.step_s is not None for loss in told)
    first, *_ = parse_schedule_csv(made.files["orders.csv"])
    assert str(first[0]) == "0F0"
