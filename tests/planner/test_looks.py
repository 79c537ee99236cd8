"""Bounds do not hang on who works them out."""

from pathlib import Path

import numpy as np
import pytest

from mmplan.planner import looks, second_process
from mmplan.planner.space import Space, build_space
from mmplan.scenario.load import load_scenario

SCENARIO = Path(__file__).parents[2] / "scenarios" / "qwen2-vl-7b.yaml"


def looked(monkeypatch: pytest.MonkeyPatch, *, halves: bool, cores: bool) -> Space:
    monkeypatch.setattr(looks, "MANY", 0 if halves else 2**40)
    if not cores:
        monkeypatch.setattr(second_process, "two_cores", lambda: False)
    space = build_space(load_scenario(SCENARIO))
    space.bounds.sharpen(np.arange(0, len(space.configurations), 101))
    monkeypatch.undo()
    return space


def test_halves_of_two_processes_of_one_and_the_whole_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = looked(monkeypatch, halves=False, cores=False)
    alone = looked(monkeypatch, halves=True, cores=False)
    both = looked(monkeypatch, halves=True, cores=True)
    assert 0 < int((whole.bounds.busiest_ns > 0).sum()) < len(whole.configurations)
    for space in (alone, both):
        for name in ("step_ns", "roomy_ns", "any_order_ns", "need_bytes"):
            assert np.array_equal(getattr(space.first, name), getattr(whole.first, name)), name
        for name in ("step_ns", "busiest_ns"):
            assert np.array_equal(getattr(space.bounds, name), getattr(whole.bounds, name)), name
