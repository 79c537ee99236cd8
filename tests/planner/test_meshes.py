"""Plans whose modules have meshes of different width: ranks, transfers, memory and what the checker refuses."""

import re
from collections import Counter
from dataclasses import replace
from math import lcm
from pathlib import Path

import numpy as np
import pytest
from meshed_toys import LLM, VISION, job, meshed
from pipeline_toys import plan

from mmplan.commands.export_targets import exported
from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import edge_bytes
from mmplan.cost_models.loads import mean_loads, sample_loads
from mmplan.errors import CheckError, InputError
from mmplan.planner.check import check_plan
from mmplan.planner.check_hangs import check_hangs
from mmplan.planner.check_program import check_program
from mmplan.planner.interval import plan_interval
from mmplan.planner.lower import lower, lower_columns
from mmplan.planner.mesh import Mesh, giver, messages, most_messages, overlap_index, partners, shared_parts, takers
from mmplan.planner.plan import Plan, load_plan, save_plan
from mmplan.planner.replan import strategy_of
from mmplan.planner.schedules.reschedule import compare_families
from mmplan.planner.simulate import simulate
from mmplan.planner.step_loads import drawn_step_loads, mean_step_loads, split_samples
from mmplan.planner.step_times import step_times
from mmplan.planner.switch_cost import switch_cost
from mmplan.planner.waves import lowered_waves, price, waves_of
from mmplan.runtime.places import idle_ranks, listed_places, listed_ranks, place_of, program_of_shard
from mmplan.runtime.requirements import process_count
from mmplan.scenario.scenario import Sample

WIDE = {"vision": (1, 8), "llm": (2, 2), "microbatch": 4}
NARROW = {"vision": (2, 1), "llm": (1, 4), "microbatch": 2}
SLICED = {"vision": (1, 4), "llm": (1, 2), "cp": 4, "microbatch": 4}
PATCHED = {"vision": (1, 2), "vision_cp": 2, "llm": (2, 1), "cp": 4, "microbatch": 8, "cut_vision": True}
UNEVEN = {"vision": (1, 3), "vision_cp": 2, "llm": (2, 4), "microbatch": 3}
SHAPES = [
    WIDE,
    NARROW,
    {**WIDE, "vision": (1, 2)},
    {**WIDE, "vision": (2, 4), "cut_vision": True},
    SLICED,
    PATCHED,
    UNEVEN,
]


def made(shape: dict[str, object], devices: int = 24) -> Plan:
    return meshed(job(devices=devices, global_batch=48 if shape is UNEVEN else 32), **shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_plan_with_unlike_meshes_is_sound_and_can_be_simulated(shape: dict[str, object]) -> None:
    one = made(shape)
    assert check_plan(one) == ()
    prediction = simulate(one, build_graph(one.scenario), AnalyticCostModel(one.scenario))
    assert prediction.step_time_s > 0
    assert plan_interval(one, prediction.step_time_s).p90_s > prediction.step_time_s
    for rank in prediction.ranks:
        assert rank.peak_memory_bytes <= one.stages[rank.stage].memory_bytes


def test_every_rank_has_one_stage() -> None:
    one = made(WIDE)
    assert [one.stage_ranks(stage) for stage in range(3)] == [tuple(range(8, 16)), (0, 1, 2, 3), (4, 5, 6, 7)]
    assert one.rank(0, 3) == 11
    assert one.rank(2, 1, 1) == 7
    assert (one.rank_count, one.world, one.parts, one.units) == (16, 16, 8, 2)
    assert [one.samples(stage) for stage in range(3)] == [1, 4, 4]


def test_a_plan_with_meshes_is_read_back_and_one_without_keeps_reading(tmp_path: Path) -> None:
    one = made(WIDE)
    save_plan(one, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == one
    old = plan(job(), [VISION, *LLM])
    save_plan(old, tmp_path / "old.json")
    text = (tmp_path / "old.json").read_text().replace(' "meshes": [],\n', "")
    assert "meshes" not in text
    (tmp_path / "old.json").write_text(text)
    assert load_plan(tmp_path / "old.json") == old


def test_parts_go_to_the_replicas_that_hold_their_samples() -> None:
    one = made(WIDE)
    program = lower(one, build_graph(one.scenario), mean_step_loads(one) * 2)
    assert check_program(program) == ()
    sends = Counter(
        (rank.rank, action.peer) for rank in program.ranks for action in rank.actions if action.kind == "SEND"
    )
    m = one.microbatches
    # replicas 0 to 3 of the tower hold a quarter each of what language replica 0 reads, in its first stage: rank 0
    expected = {(8 + v, 2 * (v // 4)): m for v in range(8)} | {(2 * (v // 4), 8 + v): m for v in range(8)}
    expected |= {(0, 4): m, (2, 6): m, (4, 0): m, (6, 2): m}
    assert sends == expected


def test_bytes_of_the_parts_are_those_of_the_whole_tensor() -> None:
    one, graph = made(WIDE), build_graph(job())
    (edge,) = (edge for edge in graph.edges() if edge.producer == "vision_projector.0")
    whole = edge_bytes(edge, mean_loads(one.scenario, one.microbatch_size), one.scenario.precision)
    program = lower(one, graph, mean_step_loads(one))
    by_direction = {
        mark: {action.bytes for rank in program.ranks for action in rank.actions if action.tensor.startswith(name)}
        for mark, name in ((">", "vision_projector.0>"), ("<", "vision_projector.0<"))
    }
    assert by_direction == {">": {whole // 4}, "<": {whole // 4}}
    first = program.ranks[0]
    parts = [a for a in first.actions if a.kind == "RECV" and a.tensor.startswith("vision_projector.0>")]
    assert Counter(action.microbatch for action in parts) == dict.fromkeys(range(one.microbatches), 4)
    assert {action.bytes for action in parts} == {whole // 4}


@pytest.mark.parametrize("shape", SHAPES)
def test_one_unit_stands_for_all_and_waves_agree_with_the_clock(shape: dict[str, object]) -> None:
    one = made(shape)
    graph, costs = build_graph(one.scenario), AnalyticCostModel(one.scenario)
    alone = simulate(one, graph, costs)
    everyone = simulate(one, graph, costs, mean_step_loads(one) * one.units)
    assert everyone.step_time_s == pytest.approx(alone.step_time_s)
    assert len(everyone.ranks) == one.units * len(alone.ranks)
    lowered = lower_columns(one, graph, mean_step_loads(one) * one.units)
    program = lower(one, graph, mean_step_loads(one) * one.units)
    ones = [1.0] * lowered.columns.size
    known, found = (price(waves, np.array(ones)) for waves in (lowered_waves(lowered), waves_of(program)))
    assert (known[1] == found[1]).all()


def test_drawn_samples_are_dealt_out_in_order() -> None:
    manifest = tuple(
        Sample(text_tokens=5 + i, images=((8, 8),) * (i % 3), audio_s=(), speech_tokens=0) for i in range(32)
    )
    one = meshed(job(manifest=manifest), **WIDE)  # type: ignore[arg-type]
    graph = build_graph(one.scenario)
    loads = drawn_step_loads(one, 0)
    assert len(loads) == 8
    samples = [[manifest[8 * r + 4 * k : 8 * r + 4 * k + 4] for k in range(4)] for r in range(2)]
    assert split_samples(one, samples)[5][1] == (manifest[8 + 4 + 1],)
    program = lower(one, graph, loads)
    assert check_program(program) == ()
    # a part without an image is not sent at all
    images = sum(load["vision"].sequences > 0 for row in loads for load in row)
    first = [
        a for rank in program.ranks for a in rank.actions if a.kind == "SEND" and a.tensor.startswith("vision_proj")
    ]
    assert len([a for a in first if ">" in a.tensor]) == images
    assert simulate(one, graph, AnalyticCostModel(one.scenario), loads).step_time_s > 0
    total = sum(sample_loads(one.scenario, (sample,))["vision"].tokens for sample in manifest)
    assert total == sum(load["vision"].tokens for row in loads for load in row)


def test_the_busiest_rank_is_counted_over_all_messages() -> None:
    meshes = [
        Mesh(modules=(), tp=tp, cp=cp, dp=dp, first_rank=0)
        for tp in (1, 2, 4)
        for cp in (1, 2, 4)
        for dp in (1, 2, 3, 8)
    ]
    for source in meshes:
        for target in meshes:
            if source == target:
                continue
            ends = list(messages(source, target))
            sent = Counter(giver for giver, _ in ends)
            got = Counter(taker for _, taker in ends)
            count, average = most_messages(source, target)
            assert count == max(*sent.values(), *got.values())
            assert len(got) == target.ranks  # every rank gets its rows
            parts: Counter[tuple[int, int]] = Counter()
            for (replica, shard), (partner, taker) in ends:
                parts[partner, taker] += shared_parts(replica, source, partner, target)
                parts[replica, -1 - shard] += shared_parts(partner, target, replica, source)
            assert average == max(parts.values()) / count
            rows = lcm(source.dp, target.dp) // target.dp * max(source.cp // target.cp, 1)
            assert {parts[taker] for taker in got} == {rows}
            for shard in range(source.width):
                takes = takers(shard, source, target)
                assert all((shard in giver(taker, source, target)) == (taker in takes) for taker in range(target.width))


def test_overlaps_of_replicas_are_counted_in_the_order_of_samples() -> None:
    for own, other in ((3, 4), (4, 6), (2, 8), (5, 5), (6, 4)):
        a, b = (Mesh(modules=(), tp=1, dp=dp, first_rank=0) for dp in (own, other))
        pairs = [(i, j) for i in range(own) for j in partners(i, a, b)]
        assert [overlap_index(i, own, j, other) for i, j in pairs] == list(range(len(pairs)))
        assert sum(shared_parts(i, a, j, b) for i, j in pairs) == lcm(own, other)


BROKEN = [
    ({"first_rank": 4}, r"rank 4 is in pipeline ranks \d \(ranks 4 to \d+\) and \d"),
    ({"first_rank": 20}, "would have ranks 20 to 27, cluster toy has 24 devices"),
    ({"tp": 2, "dp": 3}, r"would get dp=2 x 4 samples / dp=3 = 2.66667 samples of a microbatch, no whole number"),
    ({"dp": 16}, r"a replica of vision, vision_projector would get dp=2 x 4 samples / dp=16 = 0.5 samples"),
    ({"tp": 3, "dp": 2}, "tp=3 does not divide vision: "),
    ({"tp": 2, "cp": 2, "dp": 2}, "tp=2 x cp=2 x dp=2 in the mesh of .*: with cp each rank has whole layers, so that"),
    ({"ep": 2}, "ep=2 in the mesh of vision, vision_projector, which has no experts"),
    ({"patches": ("vision",)}, "vision is cut along patches, and its mesh has cp=1"),
    (
        {"patches": ("vision_projector",), "cp": 2, "dp": 4},
        "vision_projector is cut along patches, and vision, which it reads, is not",
    ),
    ({"modules": ("vision",)}, "stage 0 holds vision and vision_projector, which have unlike meshes"),
    ({"modules": ("vision", "sound")}, "sound is no module of this model"),
    ({"modules": ("llm",)}, "llm is a language model"),
    ({"modules": ()}, "of no module has tp=1 x dp=8 from rank 8: degrees start at 1"),
    ({"dp": 0}, "degrees start at 1"),
    ({"first_rank": -1}, "ranks at 0"),
    ({"tp": 2, "dp": 2, "first_rank": 11}, "tp=2 puts ranks 11 to 12 of one group on nodes 2 and 3"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_a_mesh_that_cannot_work_is_refused_by_name(change: dict[str, object], message: str) -> None:
    one = made(WIDE)
    (mesh,) = one.meshes
    broken = replace(one, meshes=(replace(mesh, **change),))  # type: ignore[arg-type]
    findings = [finding for finding in check_plan(broken) if finding.rule == "meshes"]
    assert findings
    assert re.search(message, findings[0].message), findings[0].message


def test_cp_of_two_meshes_is_nested() -> None:
    one = made(SLICED)
    (mesh,) = one.meshes
    broken = replace(one, meshes=(replace(mesh, cp=3, dp=2),))
    assert "the meshes have cp of 3, 4: of two one has to divide the other" in check_plan(broken)[0].message


def test_two_meshes_of_one_module_and_an_empty_mesh_are_refused() -> None:
    one = made(WIDE)
    (mesh,) = one.meshes
    twice = replace(one, meshes=(mesh, replace(mesh, first_rank=0)))
    assert "vision has two meshes" in [finding.message for finding in check_plan(twice)]
    spread = replace(one, spread=("vision",))
    assert "is spread over that of others" in check_plan(spread)[0].message


def test_wrong_numbers_of_a_meshed_plan_are_found() -> None:
    one = made(WIDE)
    slower = replace(one, stages=(replace(one.stages[0], forward_s=1.0), *one.stages[1:]))
    assert {finding.rule for finding in check_plan(slower)} == {"stage times"}
    shorter = replace(one, certificate=replace(one.certificate, objective_s=one.certificate.objective_s / 2))
    assert {finding.rule for finding in check_plan(shorter)} == {"objective"}


def test_what_reads_plans_knows_meshes() -> None:
    images_of = ((), ((8, 8),), ((8, 8),) * 2)
    manifest = tuple(Sample(text_tokens=5 + i, images=images_of[i % 3]) for i in range(32))
    one = meshed(job(manifest=manifest), **WIDE)  # type: ignore[arg-type]
    graph, costs = build_graph(one.scenario), AnalyticCostModel(one.scenario)
    assert check_hangs(one) == ()
    (times,) = step_times(one, graph, costs, steps=2, compositions=("in order",))
    assert times.step_s[0] == simulate(one, graph, costs, drawn_step_loads(one, 0)).step_time_s
    families = {choice.name: choice for choice in compare_families(one, ("1f1b", "zb-h1", "interleaved"), graph, costs)}
    assert families["interleaved"].plan is None
    zero_bubble = families["zb-h1"].plan
    assert zero_bubble is not None
    assert check_plan(zero_bubble) == ()
    assert simulate(zero_bubble, graph, costs).step_time_s > 0
    same = plan(one.scenario, [VISION, *LLM], dp=2, microbatch_size=4)
    assert switch_cost(same, one).moved_bytes > 0
    assert strategy_of(one, one.scenario.model.module("vision")) == "DP 8"


def test_ranks_without_work_between_others_are_started_too() -> None:
    wide = made(WIDE)
    (mesh,) = wide.meshes
    assert process_count(wide, rehearse=False) == wide.rank_count == wide.world
    apart = replace(wide, meshes=(replace(mesh, first_rank=mesh.first_rank + 4),))
    assert process_count(apart, rehearse=False) == 20
    assert idle_ranks(apart) == (8, 9, 10, 11)
    assert process_count(apart, rehearse=True) == process_count(wide, rehearse=True)
    assert listed_ranks(apart) == (0, 2, 4, 6, *range(12, 20))
    assert check_plan(apart) == ()


def test_a_rank_of_another_mesh_sends_each_shard_its_part() -> None:
    """Of ranks that share layers one sends to each taker, and every message has its receive."""
    for one in (made(WIDE), made(NARROW), made(SLICED), made(PATCHED), made(UNEVEN)):
        program = lower(one, build_graph(one.scenario), drawn_step_loads(one, 0))
        places, ranks = listed_places(one), range(one.rank_count)
        own = [program_of_shard(one, program.ranks[places[r]], place_of(one, r).shard) for r in ranks]
        assert [rank.rank for rank in own] == list(ranks)
        moves = [(rank.rank, a, (a.tensor, a.microbatch, a.bytes)) for rank in own for a in rank.actions if a.tensor]
        sent = sorted((rank, a.peer, *what) for rank, a, what in moves if a.kind == "SEND")
        assert sent == sorted((a.peer, rank, *what) for rank, a, what in moves if a.kind == "RECV")
        for rank in program.ranks:
            for kind in ("SEND", "RECV"):
                planned = sum(a.bytes * a.copies for a in rank.actions if a.kind == kind)
                assert planned == sum(a.bytes for a in own[rank.rank].actions if a.kind == kind)


def test_other_frameworks_are_told_what_they_cannot_run() -> None:
    with pytest.raises(CheckError, match="on one mesh, the plan has vision and vision_projector on tp=1"):
        exported(made(WIDE), "torch-pipelining")
    for launcher in ("slurm", "kubernetes"):
        assert any("16 processes" in text for text in exported(made(WIDE), launcher).files.values())
    with pytest.raises(InputError, match="on ranks of their own, which megatron-pp does not run"):
        check_hangs(made(WIDE), "megatron-pp")


@pytest.mark.parametrize("shape", [SLICED, PATCHED, UNEVEN])
def test_drawn_steps_and_missing_images_keep_programs_of_slices_and_overlaps_sound(shape: dict[str, object]) -> None:
    images_of, samples = ((), ((8, 8),), ((8, 8),) * 2), 48 if shape is UNEVEN else 32
    manifest = tuple(Sample(text_tokens=5 + i, images=images_of[i % 3]) for i in range(samples))
    one = meshed(job(devices=24, manifest=manifest, global_batch=samples), **shape)  # type: ignore[arg-type]
    graph, costs = build_graph(one.scenario), AnalyticCostModel(one.scenario)
    assert check_hangs(one) == ()
    assert check_program(lower(one, graph, drawn_step_loads(one, 1))) == ()
    (times,) = step_times(one, graph, costs, steps=1, compositions=("in order",))
    assert times.step_s[0] == simulate(one, graph, costs, drawn_step_loads(one, 0)).step_time_s
    (split,) = compare_families(one, ("zb-h1",), graph, costs)
    assert split.plan is not None
    assert check_plan(split.plan) == ()
