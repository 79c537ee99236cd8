"""DeepSpeed's JSON: what pipelines lose, and what is refused."""

import pytest
from random_plans import random_plan

from mmplan.errors import CheckError
from mmplan.planner.formats.deepspeed import export_deepspeed


def test_shards_of_parameters_under_a_pipeline_are_a_priced_loss() -> None:
    plan = next(p for p in map(random_plan, range(200)) if p.pp > 1 and p.cp == 1 and p.sharding == "parameters")
    told = [loss for loss in export_deepspeed(plan).losses if "its parameters" in loss.sentence]
    assert len(told) == 1 and told[0].step_s is not None


def test_tensor_and_sequence_parallelism_together_are_refused_with_both_degrees() -> None:
    plan = next(p for p in map(random_plan, range(200)) if p.tp > 1 and p.cp > 1)
    with pytest.raises(CheckError, match=f"tp={plan.tp} and cp={plan.cp}"):
        export_deepspeed(plan)
