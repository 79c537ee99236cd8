"""A LLaVA of small random weights learns alike under different plans and in a plain loop, for fifty steps."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from case_processes import run_on_ranks
from loss_curve_cases import PROCESSES, STEPS, curve_of_a_plain_loop, curve_plans, run_curves

pytestmark = pytest.mark.distributed


def test_fifty_losses_of_three_plans_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    plans = curve_plans(tmp_path)
    ranks = run_on_ranks(run_curves, PROCESSES, tmp_path, plans)
    alone = curve_of_a_plain_loop(plans["two stages"].scenario.seed)
    assert len(alone) == STEPS and sum(alone[-8:]) < 0.98 * sum(alone[:8])
    for name in plans:
        curve = [sum(parts) for parts in zip(*(rank[name] for rank in ranks), strict=True)]
        assert curve == pytest.approx(alone, rel=1e-5), name
