"""Linear attention under context parallelism: its state runs through all rows, so none is split."""

from dataclasses import replace
from pathlib import Path

import pytest

from mmplan.errors import InputError
from mmplan.planner.check_degrees import check_degrees
from mmplan.planner.configurations import context_degrees
from mmplan.planner.degrees import Degrees
from mmplan.scenario.attention_forms import GatedDelta
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario

DELTA = GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=8, conv=4)


def linear_scenario() -> Scenario:
    scenario = load_scenario(Path(__file__).parents[2] / "scenarios" / "tiny.yaml")
    modules = tuple(
        replace(module, transformer=replace(module.transformer, delta=DELTA)) if module.name == "llm" else module
        for module in scenario.model.modules
        if module.transformer is not None or module.projector is not None
    )
    return replace(scenario, model=replace(scenario.model, modules=modules))


def test_rows_of_linear_attention_are_not_split() -> None:
    assert context_degrees(linear_scenario(), tp=1, rows=1e6) == [1]
    with pytest.raises(InputError, match="llm: cp 2 splits rows, and the state of its linear attention runs through"):
        check_degrees(linear_scenario(), Degrees(cp=2))
