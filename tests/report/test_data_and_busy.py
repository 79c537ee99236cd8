"""Sparklines, bytes on links, and what `mmplan data` shows."""

import json
from io import StringIO
from pathlib import Path

import pytest
from command_runs import mmplan
from rich.console import Console

from mmplan.planner.advice import advise
from mmplan.planner.finding import Finding
from mmplan.planner.plan import Composition
from mmplan.planner.prediction import TimedAction
from mmplan.planner.program import Action
from mmplan.planner.step_times import StepTimes
from mmplan.planner.token_counts import token_counts
from mmplan.report.communication import rates_over_time
from mmplan.report.sparkline import busy_parts, sparkline
from mmplan.report.tables import findings_table
from mmplan.scenario.load import load_scenario

ROOT = Path(__file__).parents[2]
TINY = ROOT / "scenarios" / "tiny.yaml"


def compute(start_s: float, end_s: float) -> TimedAction:
    return TimedAction(0, Action("F", 0, 0), start_s, end_s)


def test_busy_parts_split_actions_at_the_edges_of_slices() -> None:
    parts = busy_parts([compute(0.0, 1.5), compute(2.0, 2.5)], 4.0, 4)
    assert parts == pytest.approx([1.0, 0.5, 0.5, 0.0])
    assert sparkline(parts) == "█▄▄ "


def test_only_what_is_empty_is_blank() -> None:
    assert sparkline([0.0, 0.001, 0.999, 1.0]) == " ▁██"
    assert busy_parts([], 1.0, 3) == [0.0] * 3


def test_rates_add_up_while_transfers_overlap() -> None:
    def send(start_s: float, end_s: float) -> TimedAction:
        return TimedAction(0, Action("SEND", 0, 0, 1, "a>b", 8), start_s, end_s)

    times_s, rates = rates_over_time([send(0.0, 2.0), send(1.0, 3.0), send(5.0, 5.0)])
    assert times_s.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert rates.tolist() == [4.0, 8.0, 4.0, 0.0]


def times(composition: Composition, *step_s: float, fits: bool = True) -> StepTimes:
    return StepTimes(composition=composition, step_s=step_s, imbalance={}, peak_memory_bytes=1, fits=fits)


def test_the_quickest_composition_is_advised_with_what_it_may_cost() -> None:
    advice = advise([times("in order", 10.0, 12.0), times("reorder", 9.5, 11.5), times("balance", 9.0, 11.0)])
    assert (advice.composition, advice.break_even_s, advice.significant) == ("balance", 1.0, True)
    assert advice.gain == pytest.approx(1.0 / 11.0)


def test_what_passes_the_memory_is_not_advised() -> None:
    in_order, balance = times("in order", 10.0, 12.0), times("balance", 9.0, 11.0, fits=False)
    assert advise([in_order, times("reorder", 9.5, 11.5), balance]).composition == "reorder"


def test_a_gain_within_the_noise_is_no_reason_to_change() -> None:
    advice = advise([times("in order", 10.0, 12.0, 11.0), times("balance", 12.0, 8.0, 12.9)])
    assert (advice.composition, advice.significant) == ("in order", False)


def test_tokens_of_tiny_are_those_of_its_distribution() -> None:
    """0 to 3 images of 64 patches with weights 1, 2, 2, 1: a mean of 96, one microbatch in six without."""
    vision = next(
        one for one in token_counts(load_scenario(TINY), microbatch_size=1, replicas=2) if one.module == "vision"
    )
    assert vision.mean == pytest.approx(96, rel=0.05)
    assert vision.most == 192
    assert vision.lacking == pytest.approx(1 / 6, abs=0.02)
    assert vision.differing == pytest.approx(2 * vision.lacking * (1 - vision.lacking))


def test_data_of_a_plan_writes_picture_document_and_the_advised_plan(tmp_path: Path) -> None:
    assert mmplan("optimize", TINY, "-o", "p.json", cwd=tmp_path).returncode == 0
    result = mmplan("data", TINY, "p.json", "-o", "q.json", "--plot", "d.png", "--json", "d.json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    document = json.loads((tmp_path / "d.json").read_text())
    assert document["schema"] == "mmplan.data/1"
    assert [one["composition"] for one in document["compositions"]] == ["in order", "reorder", "balance"]
    assert len(document["compositions"][0]["step_s"]) == 64
    assert json.loads((tmp_path / "q.json").read_text())["composition"] == document["advice"]["composition"]
    assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")
    assert mmplan("check", "q.json", cwd=tmp_path).returncode == 0
    hangs = mmplan("check", "q.json", "--runtime", "fsdp", cwd=tmp_path)
    assert hangs.returncode == 1
    assert "hang under fsdp" in hangs.stdout
    unknown = mmplan("check", "q.json", "--runtime", "foo", cwd=tmp_path)
    assert unknown.returncode == 2
    assert "no rules are known for runtime 'foo'" in unknown.stderr


def test_a_plan_of_another_scenario_and_a_missing_plan_are_refused(tmp_path: Path) -> None:
    assert mmplan("optimize", TINY, "-o", "p.json", cwd=tmp_path).returncode == 0
    other = mmplan("data", ROOT / "scenarios" / "tiny-rehearsal.yaml", "p.json", cwd=tmp_path)
    assert other.returncode == 2
    assert "a plan of scenario tiny" in other.stderr
    nothing = mmplan("data", TINY, "-o", "q.json", cwd=tmp_path)
    assert nothing.returncode == 2
    assert "a plan is needed" in nothing.stderr


def test_tensors_in_brackets_are_not_taken_for_markup() -> None:
    findings = (Finding(rule="deadlock", message="0SEND1[llm.0>llm.1]@1 before 0RECV0[llm.0<llm.1]@1"),)
    text = StringIO()
    Console(file=text, width=200).print(findings_table(None, findings))
    assert "0SEND1[llm.0>llm.1]@1 before 0RECV0[llm.0<llm.1]@1" in text.getvalue()
