"""Sweeps: rows, efficiency, where to stop; and what happens to points that fail."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmplan.errors import InputError
from mmplan.planner import repeated
from mmplan.planner.repeated import Limits
from mmplan.planner.result import OptimizeResult
from mmplan.planner.search import optimize
from mmplan.planner.sweep import SolvedPoint, interruptible, read_points, solve_points
from mmplan.report.sweep import SweepRow, advice_of, curves, scaling_advice, sweep_row, with_efficiency
from mmplan.report.sweep_output import plot_sweep, save_sweep_csv, sweep_document, sweep_tables
from mmplan.report.traffic_ratio import bytes_per_flop, ratio_jumps
from mmplan.scenario.document import read_document
from mmplan.scenario.scenario import Scenario

TINY = read_document(Path(__file__).parents[2] / "scenarios" / "tiny.yaml")


def points(*values: dict[str, Any]) -> list[SolvedPoint]:
    return list(solve_points(read_points(TINY, values), Limits()))


@pytest.fixture(scope="module")
def rows() -> tuple[SweepRow, ...]:
    """No, one and two nodes, with batches of 16 and of 1."""
    values = [{"batch.global": batch, "cluster.nodes": nodes} for batch in (16, 1) for nodes in (0, 1, 2)]
    return with_efficiency([sweep_row(point) for point in points(*values)])


def test_a_row_is_the_plan_of_its_scenario(rows: tuple[SweepRow, ...]) -> None:
    one, two = rows[1:3]
    assert (one.devices, two.devices) == (4, 8)
    assert one.step_time_s is not None and one.samples_per_s == pytest.approx(16 / one.step_time_s)
    assert one.degrees.startswith("pp=2 dp=2 tp=1 ZeRO-1, ")
    assert one.gap is not None and one.gap <= 0.01


def test_efficiency_is_against_the_first_row_with_a_plan_of_its_curve(rows: tuple[SweepRow, ...]) -> None:
    _, one, two, *others = rows
    assert one.efficiency == 1.0
    assert one.samples_per_s is not None and two.samples_per_s is not None
    assert two.efficiency == pytest.approx(two.samples_per_s / one.samples_per_s / 2)
    assert others[1].efficiency == 1.0


def test_a_point_that_is_no_scenario_is_a_row_with_the_reason(rows: tuple[SweepRow, ...]) -> None:
    assert rows[0].step_time_s is None
    assert rows[0].reason.endswith("cluster.nodes: expected at least 1, found 0")


def test_a_point_that_has_no_plan_is_a_row_with_the_reason() -> None:
    sizes = ((16, 2), (18, 1), (18, 2))
    values = [{"batch.global": batch, "constraints.dp": 3, "cluster.nodes": nodes} for batch, nodes in sizes]
    uneven, large, solved = map(sweep_row, points(*values))
    assert uneven.reason == "constraints.dp allows 3, and none divides the global batch of 16: 16 / 3 = 5.333"
    assert uneven.devices == 8
    assert large.reason.endswith("tp 1 x pp 2 x dp 3 = 6 devices, the cluster has 4")
    assert solved.used_devices in (6, 8)  # 8 with encoders on ranks of their own


def test_a_sweep_of_no_scenario_at_all_is_an_error() -> None:
    with pytest.raises(InputError, match=r"cluster\.nodez: unknown key; did you mean 'nodes'\?"):
        read_points(TINY, [{"cluster.nodez": 1}, {"cluster.nodez": 2}])


def curve(*speeds: float, batch: int = 8) -> list[SweepRow]:
    """Samples per second on 1, 2, 4, ... devices."""
    return [
        SweepRow(
            values={"cluster.nodes": 2**index, "batch.global": batch},
            devices=2**index,
            used_devices=2**index,
            step_time_s=batch / speed,
            samples_per_s=speed,
            tokens_per_s_per_device=speed,
            gap=0.0,
        )
        for index, speed in enumerate(speeds)
    ]


def test_the_advice_stops_before_the_first_doubling_that_brings_too_little() -> None:
    (told,) = scaling_advice(curve(1.0, 1.9, 3.0, 3.3), worth=1.5)
    assert told == (
        "batch.global=8: stop at 4 devices (2.67 s per step): from there to 8 a doubling brings 1.10 times the samples "
        "per second, less than 1.5"
    )
    (told,) = scaling_advice(curve(1.0, 1.9, 3.0, 3.3), worth=1.05)
    assert told.startswith("batch.global=8: adding devices pays up to 8, the most that was tried: every doubling")


def test_each_curve_has_its_advice_and_a_single_point_none() -> None:
    told = scaling_advice([*curve(1.0, 1.2), *curve(2.0, 3.9, batch=16), *curve(5.0, batch=32)], worth=1.5)
    assert [text.partition(":")[0] for text in told] == ["batch.global=8", "batch.global=16"]


def test_by_another_objective_the_advice_names_the_best_cluster_by_it() -> None:
    rows = [
        replace(row, cost_per_million_tokens=cost) for row, cost in zip(curve(1, 2, 3), (4.0, 2.5, 3.0), strict=True)
    ]
    assert advice_of(rows, 1.5, "cost") == (
        "batch.global=8: least cost of a million tokens on a cluster of 2 devices (2.5), most on one of 1 device (4)",
    )
    assert advice_of(rows, 1.5, "device-time") == (
        "batch.global=8: most tokens per second and device on a cluster of 4 devices (3), "
        "fewest on one of 1 device (1)",
    )
    assert advice_of(rows, 1.5, "step-time") == scaling_advice(rows, 1.5)


def test_of_equal_clusters_a_curve_has_the_best_by_the_objective() -> None:
    (fast,), (cheap,) = curve(2.0), curve(1.0)
    rows = [replace(fast, cost_per_million_tokens=4.0), replace(cheap, cost_per_million_tokens=2.0)]
    assert curves(rows, "cost")["batch.global=8"] == [rows[1]]
    assert curves(rows, "step-time")["batch.global=8"] == [rows[0]]


def test_between_other_multiples_the_speed_up_is_per_doubling() -> None:
    one, _, four = curve(1.0, 1.0, 2.25)
    assert "a doubling brings 1.50 times" in scaling_advice([one, four], worth=1.6)[0]
    assert "at least 1.50 times" in scaling_advice([one, four], worth=1.4)[0]


def test_the_ratio_of_bytes_to_flops_is_told_where_it_jumps() -> None:
    """As published for batches 8, 16, 32: 12.4, 58.9, 241.2 MB, 3.8, 7.1, 13.9 TFLOP, ratios 3.26, 8.30, 17.35."""
    sizes = {8: (12.4e6, 3.8e12), 16: (58.9e6, 7.1e12), 32: (241.2e6, 13.9e12), 64: (482.4e6, 27.8e12)}
    rows = [
        SweepRow(
            values={"seed": 1, "batch.global": batch}, devices=4, stage_bytes=round(sent), flops=flops, degrees="d"
        )
        for batch, (sent, flops) in sizes.items()
    ]
    ratios = [bytes_per_flop(row) for row in rows]
    assert ratios == pytest.approx([3.26e-6, 8.30e-6, 17.35e-6, 17.35e-6], rel=0.002)
    assert ratio_jumps(reversed(rows)) == (
        "seed=1: from batch.global 8 to 16 the bytes between stages per FLOP grow 2.54 times: d becomes d",
        "seed=1: from batch.global 16 to 32 the bytes between stages per FLOP grow 2.09 times: d becomes d",
    )
    (begin,) = ratio_jumps([replace(rows[0], stage_bytes=0), rows[1]])
    assert "per FLOP begin: " in begin


def test_a_row_counts_the_bytes_and_flops_of_its_plan(rows: tuple[SweepRow, ...]) -> None:
    assert rows[1].stage_bytes == pytest.approx(rows[2].stage_bytes, rel=1e-4)  # as many samples pass the same cuts
    assert rows[1].flops is not None and rows[1].flops > 0
    assert bytes_per_flop(rows[0]) is None


def test_ctrl_c_keeps_the_rows_done_and_drops_the_point_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    solved: list[OptimizeResult] = []

    def slow(scenario: Scenario, **options: Any) -> OptimizeResult:
        result = optimize(scenario, **options)
        if solved:
            options["stop"]()
            signal.raise_signal(signal.SIGINT)
            certificate = replace(result.plan.certificate, status="feasible")
            result = replace(result, plan=replace(result.plan, certificate=certificate))
        solved.append(result)
        return result

    monkeypatch.setattr(repeated, "optimize", slow)
    before = signal.getsignal(signal.SIGINT)
    with interruptible(Limits()) as limits:
        done = list(solve_points(read_points(TINY, [{"seed": seed} for seed in range(3)]), limits))
    assert [point.values for point in done] == [{"seed": 0}]
    assert len(solved) == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_rows_go_to_table_csv_document_and_picture(rows: tuple[SweepRow, ...], tmp_path: Path) -> None:
    shown, *notes = sweep_tables("tiny", rows)
    assert not isinstance(shown, str) and shown.row_count == len(rows)
    assert [column.header for column in shown.columns][:2] == ["global", "nodes"]
    assert len(notes) == len({row.reason for row in rows if row.reason})
    save_sweep_csv(rows, tmp_path / "rows.csv")
    head, first, second, *_ = (tmp_path / "rows.csv").read_text().splitlines()
    assert head.startswith("batch.global,cluster.nodes,devices,used_devices,step_time_s,")
    assert first.startswith("16,0,,,,,,,,,,,,")
    assert second.startswith("16,1,4,4,")
    document = sweep_document("tiny", rows, ["stop"], len(rows) + 1)
    assert (document["schema"], document["complete"]) == ("mmplan.sweep/1", False)
    assert document["rows"][1]["values"] == {"batch.global": 16, "cluster.nodes": 1}
    plot_sweep(rows, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
