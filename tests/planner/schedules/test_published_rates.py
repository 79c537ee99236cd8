"""Bubble rates of the zero-bubble paper (Qi et al., arXiv 2401.10241, tables 3 to 5, 9), calculated from profiles.

The rate is 1 - m (F + B + W) / X. X is the longest span of a rank, which the paper's optimizer needs no rank to wait
for; where makespans differ they are larger and the rates by makespan are named apart. Two rows stand here; all twelve
are read where the full table is at hand.
"""

import csv
from pathlib import Path

import pytest
from schedule_toys import chain

from mmplan.planner.schedules.evaluate import Evaluation, evaluate
from mmplan.planner.schedules.families import FAMILIES
from mmplan.planner.schedules.problem import NotApplicable
from mmplan.scenario.schedule_names import ScheduleName

OWN = Path(__file__).parent / "published_rates.csv"
FULL = (Path(__file__).parents[3] / ".." / "shared" / "data" / "measured" / "pipeline_profiles_dev.csv").resolve()
NAMES: dict[str, ScheduleName] = {
    "1F1B": "1f1b",
    "1F1B-I": "interleaved",
    "ZB-H1": "zb-h1",
    "ZB-H2": "zb-h2",
    "ZB-1p": "zb-1p",
    "ZB-2p": "zb-2p",
}
MEMORY = {"ZB-H1": 1, "ZB-1p": 1, "ZB-H2": 2, "ZB-2p": 2}  # of p activations
ALLOWED = 0.005


def evaluated(name: str, p: int, m: int, v: int, f: float, b: float, w: float, hop: float) -> Evaluation:
    capacity = 2.0 * p * MEMORY[name] if name in MEMORY else float("inf")
    chunks = v if name == "1F1B-I" else 1
    problem = chain(p, m, forward_s=f, input_s=b, weight_s=w, hop_s=hop, capacity=capacity, chunks=chunks)
    schedule = FAMILIES[NAMES[name]](problem)
    assert not isinstance(schedule, NotApplicable)
    return evaluate(problem, schedule)


@pytest.mark.parametrize("name", NAMES)
def test_rates_of_the_own_rows(name: str) -> None:
    for row in csv.DictReader(OWN.open()):
        times = [float(row[key]) for key in ("forward_ms", "input_ms", "weight_ms", "hop_ms")]
        m = int(row["m"])
        evaluation = evaluated(name, int(row["p"]), m, int(row["v"]), *times)
        assert 1 - m * sum(times[:3]) / evaluation.span_s == pytest.approx(float(row[name]), abs=ALLOWED)


@pytest.mark.skipif(not FULL.exists(), reason="the full table is not here")
@pytest.mark.parametrize("name", NAMES)
def test_rates_of_all_published_rows(name: str) -> None:
    rows = [r for r in csv.DictReader(FULL.open()) if r["schedule"] == name and r["T_F"]]
    assert len(rows) == 12
    for row in rows:
        times = [float(row[key]) for key in ("T_F", "T_B", "T_W", "T_comm")]
        p, m = int(row["stages_p"]), int(row["microbatches_m"])
        evaluation = evaluated(name, p, m, (int(row["layers"]) + 2) // p, *times)
        found = 1 - m * sum(times[:3]) / evaluation.span_s
        assert found == pytest.approx(float(row["bubble_rate"]), abs=ALLOWED), row["id"]


@pytest.mark.parametrize(
    ("name", "rates", "most"),
    [("zb-v", (0.0703, 0.0403), 8.0), ("v-half", (0.1702, 0.1447), 5.5), ("v-min", (0.3353, 0.2721), 8 / 3 + 1.5)],
)
def test_v_families_reach_the_known_rates_of_the_same_times(
    name: ScheduleName, rates: tuple[float, float], most: float
) -> None:
    """p = 8, m = 24, two chunks per rank (arXiv 2401.10241, 2405.15362); in at most `most` microbatches of memory."""
    times = ((18.522, 18.086, 9.337, 0.601), (29.718, 29.444, 19.927, 0.527))
    for rate, (f, b, w, hop) in zip(rates, times, strict=True):
        problem = chain(8, 24, forward_s=f, input_s=b, weight_s=w, hop_s=hop, chunks=2, v_shaped=True)
        schedule = FAMILIES[name](problem)
        assert not isinstance(schedule, NotApplicable)
        evaluation = evaluate(problem, schedule)
        assert 1 - 24 * (f + b + w) / evaluation.span_s <= rate + ALLOWED
        assert max(evaluation.peaks) <= 2 * most


def test_zb_v_moves_weight_gradients_into_gaps_where_seconds_differ() -> None:
    """1.5B: .0703 known; .0728 in the order by hand."""
    f, b, w, hop = 18.522, 18.086, 9.337, 0.601
    problem = chain(8, 24, forward_s=f, input_s=b, weight_s=w, hop_s=hop, chunks=2, v_shaped=True)
    schedule = FAMILIES["zb-v"](problem)
    assert not isinstance(schedule, NotApplicable)
    assert 1 - 24 * (f + b + w) / evaluate(problem, schedule).span_s == pytest.approx(0.0703, abs=1e-4)


def test_zb_2p_lets_the_last_gradients_pass_first() -> None:
    """28.3B, p = 32, m = 256: .0018 published; .0023 where forwards go first until the end."""
    p, m, f, b, w, hop = 32, 256, 10.402, 10.248, 7.698, 0.460
    found = evaluated("ZB-2p", p, m, 1, f, b, w, hop)
    assert 1 - m * (f + b + w) / found.span_s == pytest.approx(0.0018, abs=1e-4)


def test_span_and_makespan_differ_for_zb_h2_and_agree_for_zb_h1() -> None:
    """6.2B, p = 8, m = 24: ZB-H2 .0698 by span, .1003 by makespan."""
    row = (8, 24, 4, 29.718, 29.444, 19.927, 0.527)
    h1, h2 = evaluated("ZB-H1", *row), evaluated("ZB-H2", *row)
    assert h1.span_s == pytest.approx(h1.makespan_s)
    assert h2.makespan_s > 1.02 * h2.span_s


def test_zb_h1_is_its_closed_form() -> None:
    """X = m T + (p - 1)(F + B - W) + 4 (p - 1) c."""
    p, m, f, b, w, c = 8, 24, 18.522, 18.086, 9.337, 0.601
    evaluation = evaluated("ZB-H1", p, m, 3, f, b, w, c)
    assert evaluation.span_s == pytest.approx(m * (f + b + w) + (p - 1) * (f + b - w) + 4 * (p - 1) * c)


def test_1f1b_is_its_closed_form_with_hops() -> None:
    """X = (m + p - 1) T + 2 (p - 1) c (1 + (m - 1) / p): hops also enter the steady state; to 2e-4."""
    p, m, f, b, w, c = 8, 24, 18.522, 18.086, 9.337, 0.601
    expected = (m + p - 1) * (f + b + w) + 2 * (p - 1) * c * (1 + (m - 1) / p)
    assert evaluated("1F1B", p, m, 3, f, b, w, c).makespan_s == pytest.approx(expected, rel=2e-4)
