"""Charts and traces of the tiny scenario, cut in two by hand."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.axes import Axes

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.planner.modalities import stage_modality
from mmplan.planner.plan import Certificate, Plan, StagePlan, scenario_hash
from mmplan.planner.prediction import Prediction
from mmplan.planner.schedules.reschedule import refuse_unusable, with_family
from mmplan.planner.simulate import simulate
from mmplan.report.charts import shortened
from mmplan.report.gantt import plot_gantt
from mmplan.report.page import compare_page
from mmplan.report.perfetto import save_trace, trace_events
from mmplan.report.summary import summarise
from mmplan.scenario.load import load_scenario

TINY = Path(__file__).parents[2] / "scenarios" / "tiny.yaml"


@pytest.fixture(scope="module")
def planned() -> tuple[Plan, Prediction]:
    scenario = load_scenario(TINY)
    graph = build_graph(scenario)
    ids = [layer.id for layer in graph.layers()]
    halves = (ids[: len(ids) // 2], ids[len(ids) // 2 :])
    stages = tuple(
        StagePlan(
            layers=tuple(half),
            forward_s=1.0,
            backward_s=2.0,
            finish_s=0.0,
            in_flight=1,
            memory_bytes=1,
            capacity_bytes=2**30,
        )
        for half in halves
    )
    plan = Plan(
        scenario=scenario,
        scenario_hash=scenario_hash(scenario),
        dp=1,
        tp=1,
        microbatch_size=1,
        microbatches=scenario.global_batch,
        schedule="1f1b",
        stages=stages,
        certificate=Certificate(objective_s=1.0, bound_s=0.0, gap=1.0, status="given", wall_s=0.0),
    )
    return plan, simulate(plan, graph, AnalyticCostModel(scenario))


@pytest.fixture(scope="module", params=["interleaved", "zb-v"])
def chunked(request: pytest.FixtureRequest, planned: tuple[Plan, Prediction]) -> tuple[Plan, Prediction]:
    """The same layers as two chunks on each of two ranks."""
    plan, _ = planned
    graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
    made = refuse_unusable(with_family(plan, request.param, graph, costs))
    return made, simulate(made, graph, costs)


def test_a_chart_is_a_png_and_replaces_the_file_whole(planned: tuple[Plan, Prediction], tmp_path: Path) -> None:
    path = tmp_path / "gantt.png"
    path.write_text("old")
    plot_gantt(*planned, path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [file.name for file in tmp_path.iterdir()] == ["gantt.png"]


def test_a_run_without_memory_steps_is_drawn_too(planned: tuple[Plan, Prediction], tmp_path: Path) -> None:
    plan, prediction = planned
    bare = replace(prediction, ranks=tuple(replace(rank, memory_steps=()) for rank in prediction.ranks))
    plot_gantt(plan, bare, tmp_path / "run.png", title="measured")
    assert (tmp_path / "run.png").stat().st_size > 10_000


def test_a_stage_has_the_modality_of_most_of_its_layers(planned: tuple[Plan, Prediction]) -> None:
    plan, _ = planned
    assert stage_modality(plan, plan.pp - 1) == "text"


def test_a_trace_has_every_action_once_on_its_track(planned: tuple[Plan, Prediction], tmp_path: Path) -> None:
    plan, prediction = planned
    save_trace(plan, prediction, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == sum(item.action.kind != "RECV" for item in prediction.timeline)
    last_us = max(event["ts"] + event["dur"] for event in slices)
    assert last_us == pytest.approx(1e6 * prediction.step_time_s)
    for rank in prediction.ranks:
        track = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if e["pid"] == rank.rank and e["tid"] == 0)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(track))


def test_every_arrow_of_a_trace_begins_in_a_transfer_and_ends_in_its_reader(
    planned: tuple[Plan, Prediction],
) -> None:
    plan, prediction = planned
    events = trace_events(plan, prediction)
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == sum(item.action.kind == "SEND" for item in prediction.timeline)
    for number, start in starts.items():
        assert ends[number]["pid"] != start["pid"]
        assert ends[number]["ts"] > start["ts"]  # type: ignore[operator]


def test_chunks_are_drawn_on_the_row_of_their_rank(
    chunked: tuple[Plan, Prediction], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[list[str]] = []
    monkeypatch.setattr(Axes, "set_yticks", lambda axes, ticks, labels, **_: names.append(labels))
    plot_gantt(*chunked, tmp_path / "gantt.png")
    assert [name.split("  ")[0] for name in names[0]] == ["rank 0", "rank 1"]
    assert all(name.count("|") == 1 for name in names[0])


def test_an_arrow_ends_in_the_chunk_that_reads_the_tensor(chunked: tuple[Plan, Prediction]) -> None:
    plan, prediction = chunked
    stage_of = {layer: index for index, stage in enumerate(plan.stages) for layer in stage.layers}
    start_us = {
        (item.action.stage, item.action.kind == "F", item.action.microbatch): 1e6 * item.start_s
        for item in prediction.timeline
        if item.action.kind in "FBI"
    }
    ends = {event["id"]: event["ts"] for event in trace_events(plan, prediction) if event["ph"] == "f"}
    for number, item in enumerate(prediction.timeline):
        if item.action.kind == "SEND":
            forward = ">" in item.action.tensor
            layer = item.action.tensor.replace("<", ">").split(">")[1 if forward else 0]
            assert ends[number] == pytest.approx(start_us[stage_of[layer], forward, item.action.microbatch])


def test_a_track_names_every_chunk_of_its_rank(chunked: tuple[Plan, Prediction]) -> None:
    names = [event["args"]["name"] for event in trace_events(*chunked) if event["name"] == "process_name"]  # type: ignore[index]
    assert [name.count("stage") for name in names] == [2, 2]


def test_a_long_name_keeps_both_ends() -> None:
    assert shortened("best") == "best"
    short = shortened("a-very-long-plan-name-with-many-words-final-v2")
    assert len(short) <= 32 and short.startswith("a-very-long") and short.endswith("final-v2")


def test_a_page_of_unlike_plans_names_both_scenarios(planned: tuple[Plan, Prediction], tmp_path: Path) -> None:
    plan, prediction = planned
    other = replace(plan, scenario=replace(plan.scenario, name="other"))
    long_name = "plan-" * 20
    plans, predictions = {"best": plan, long_name: other}, {"best": prediction, long_name: prediction}
    summaries = [summarise(name, each, predictions[name]) for name, each in plans.items()]
    compare_page(plans, predictions, summaries, tmp_path / "page.html")
    assert "<h1>Plans for tiny, other</h1>" in (tmp_path / "page.html").read_text()
