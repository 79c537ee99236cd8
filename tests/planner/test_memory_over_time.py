"""Memory in array code against the liveness of the simulator and against hand counts."""

from dataclasses import replace

import numpy as np
import pytest
from pipeline_toys import SetPrices, plan, scenario

from mmplan.cost_models.build import build_graph
from mmplan.planner.columns import columns_of
from mmplan.planner.durations import predicted_durations
from mmplan.planner.liveness import footprint
from mmplan.planner.lower import lower
from mmplan.planner.memory_over_time import held_bytes, memory_events, memory_over_time, peak_bytes
from mmplan.planner.program import Action, Program, RankProgram
from mmplan.planner.simulate import replay
from mmplan.planner.step_loads import drawn_step_loads
from mmplan.planner.timing import time_program
from mmplan.scenario.scenario import Distribution

STAGES = [["vision.embed", "vision.0", "vision_projector.0"], ["llm.embed", "llm.0"], ["llm.1", "llm.head", "llm.loss"]]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("frozen", [False, True])
def test_arrays_hold_what_the_simulator_says_over_time(schedule: str, frozen: bool) -> None:
    toy = scenario(llm_layers=2, vision_layers=1, global_batch=12, frozen_vision=frozen)
    images = Distribution(values=(0.0, 1.0, 3.0), weights=(0.4, 0.3, 0.3))
    made = plan(replace(toy, data=replace(toy.data, images=images)), STAGES, dp=2, schedule=schedule)  # type: ignore[arg-type]
    graph, loads = build_graph(made.scenario), drawn_step_loads(made, 0)
    prices = SetPrices(forward={"vision.0": 1.0, "llm.0": 1.5, "llm.1": 1.0}, dgrad={"llm.0": 2.0, "llm.1": 2.5})
    program = lower(made, graph, loads)
    durations = predicted_durations(made, graph, prices, program, loads)
    memory = footprint(made, graph, program, loads)
    prediction = replay(program, durations, memory)
    kept = np.zeros((2, 3, 6), dtype=np.int64)
    for rank, row in zip(program.ranks, memory.kept_bytes, strict=True):
        for (stage, microbatch), size in row.items():
            kept[rank.replica, stage, microbatch] = size
    columns = columns_of(program)
    events = memory_events(columns)
    peaks = peak_bytes(events, kept, len(program.ranks))
    expected = [r.peak_memory_bytes - s for r, s in zip(prediction.ranks, memory.static_bytes, strict=True)]
    assert peaks.tolist() == expected
    timing = time_program(program, durations)
    start_s, end_s = (np.array([t for row in rows for t in row]) for rows in (timing.start_s, timing.end_s))
    times_s, held = memory_over_time(events, kept, start_s, end_s)
    for index, rank in enumerate(prediction.ranks):
        own = events.row == index
        at = dict(zip(times_s[own].tolist(), held[own].tolist(), strict=True))  # the last change at a time counts
        steps = {time_s: bytes_ - memory.static_bytes[index] for time_s, bytes_ in rank.memory_steps}
        assert {t: b for t, b in steps.items() if t in at} == at


def test_a_stage_without_backward_holds_one_microbatch_at_a_time() -> None:
    forwards = tuple(Action("F", 0, k) for k in range(3))
    program = Program(ranks=(RankProgram(rank=0, stage=0, replica=0, actions=forwards),), microbatches=3, replicas=1)
    events = memory_events(columns_of(program))
    assert held_bytes(events, np.array([[[5, 7, 2]]])).tolist() == [5, 0, 7, 0, 2, 0]
    assert peak_bytes(events, np.array([[[5, 7, 2]]]), 1).tolist() == [7]


def test_many_draws_give_what_each_gives_alone() -> None:
    toy = scenario(llm_layers=2, vision_layers=1, global_batch=4)
    made = plan(toy, STAGES)
    graph, loads = build_graph(toy), drawn_step_loads(made, 0)
    columns = columns_of(lower(made, graph, loads))
    events = memory_events(columns)
    draws = np.random.default_rng(0).integers(0, 100, (1, 3, 4, 5))
    together = peak_bytes(events, draws, 3)
    for draw in range(5):
        assert (together[:, draw] == peak_bytes(events, draws[..., draw], 3)).all()
    assert (held_bytes(events, draws)[-1] == 0).all()
