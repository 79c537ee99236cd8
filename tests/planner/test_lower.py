"""Lowered programs: what is sent to whom, in which order, and that no cut can make them deadlock."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipeline_toys import plan, scenario

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import edge_bytes
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.loads import mean_loads, sample_loads
from mmplan.errors import CheckError
from mmplan.planner.check import check_tensors
from mmplan.planner.check_program import check_program
from mmplan.planner.lower import lower
from mmplan.planner.plan import Plan
from mmplan.planner.stage_graph import build_stage_graph
from mmplan.planner.step_loads import mean_step_loads
from mmplan.scenario.load import load_scenario
from mmplan.scenario.samples import microbatch_samples
from mmplan.scenario.scenario import Sample

ENCODERS = [
    ["vision.embed", "vision.0"],
    ["audio.embed", "audio.0", "audio_projector.0"],
    ["vision_projector.0", "llm.embed", "llm.0"],
    ["llm.1", "llm.head", "llm.loss"],
]


def test_a_chain_of_two_stages_reads_as_expected() -> None:
    made = plan(scenario(llm_layers=2, global_batch=2), [["llm.embed", "llm.0"], ["llm.1", "llm.head", "llm.loss"]])
    program = lower(made, build_graph(made.scenario), mean_step_loads(made))
    first, second = ([str(action) for action in rank.actions] for rank in program.ranks)
    assert first == [
        "0F0",
        "0SEND0[llm.0>llm.1]@1",
        "0F1",
        "0SEND1[llm.0>llm.1]@1",
        "0RECV0[llm.0<llm.1]@1",
        "0B0",
        "0RECV1[llm.0<llm.1]@1",
        "0B1",
        "0STEP",
    ]
    # The second activation is made at 2 s, when stage 1 ends its first forward: its buffer is posted before that.
    assert second == [
        "1RECV0[llm.0>llm.1]@0",
        "1RECV1[llm.0>llm.1]@0",
        "1F0",
        "1B0",
        "1SEND0[llm.0<llm.1]@0",
        "1F1",
        "1B1",
        "1SEND1[llm.0<llm.1]@0",
        "1STEP",
    ]


def test_reductions_stand_before_the_update_and_only_with_replicas() -> None:
    stages = [["llm.embed", "llm.0"], ["llm.1", "llm.head", "llm.loss"]]
    made = plan(scenario(llm_layers=2, global_batch=4), stages, dp=2)
    program = lower(made, build_graph(made.scenario), mean_step_loads(made))
    assert [rank.rank for rank in program.ranks] == [0, 2]
    assert [str(action) for action in program.ranks[1].actions[-2:]] == ["1REDUCE", "1STEP"]


def test_every_replica_is_listed_when_their_loads_differ() -> None:
    stages = [["llm.embed", "llm.0"], ["llm.1", "llm.head", "llm.loss"]]
    made = plan(scenario(llm_layers=2, global_batch=4), stages, dp=2)
    program = lower(made, build_graph(made.scenario), mean_step_loads(made) * 2)
    assert [(rank.rank, rank.stage, rank.replica) for rank in program.ranks] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
    ]
    assert {action.peer for action in program.ranks[1].actions if action.kind == "SEND"} == {3}
    assert check_program(program) == ()


def test_a_microbatch_without_images_sends_nothing_from_vision_and_still_runs_it() -> None:
    manifest = (Sample(text_tokens=4, images=((8, 8),), audio_s=(0.1,)), Sample(text_tokens=4, audio_s=(0.1,)))
    toy = scenario(llm_layers=2, vision_layers=1, audio_layers=1, manifest=manifest, global_batch=2)
    made = plan(toy, ENCODERS)
    graph = build_graph(toy)
    (samples,) = microbatch_samples(toy, dp=1, microbatch_size=1, step=0)
    program = lower(made, graph, [[sample_loads(toy, group) for group in samples]])
    vision = program.ranks[0].actions
    assert [(a.kind, a.microbatch) for a in vision if a.kind in ("F", "B", "SEND", "RECV")] == [
        ("F", 0),
        ("SEND", 0),
        ("F", 1),
        ("RECV", 0),
        ("B", 0),
        ("B", 1),
    ]
    assert check_program(program) == ()


def test_parallel_encoders_feed_one_stage_and_have_its_depth_plus_one() -> None:
    toy = scenario(llm_layers=2, vision_layers=1, audio_layers=1, global_batch=2)
    stages = build_stage_graph(ENCODERS, build_graph(toy))
    assert {(cut.activation, cut.source, cut.target) for cut in stages.cuts} == {
        ("vision.0>vision_projector.0", 0, 2),
        ("audio_projector.0>llm.embed", 1, 2),
        ("llm.0>llm.1", 2, 3),
    }
    assert stages.depths == (3, 3, 2, 1)


def test_stages_in_a_circle_are_refused() -> None:
    toy = scenario(llm_layers=3, global_batch=2)
    with pytest.raises(CheckError, match="stages 0, 1 wait for each other"):
        build_stage_graph([["llm.embed", "llm.0", "llm.2"], ["llm.1", "llm.head", "llm.loss"]], build_graph(toy))


def test_a_forgotten_layer_is_named() -> None:
    toy = scenario(llm_layers=2, global_batch=2)
    with pytest.raises(CheckError, match=r"layer llm\.1 is in no stage"):
        build_stage_graph([["llm.embed", "llm.0"], ["llm.head", "llm.loss"]], build_graph(toy))


def test_loads_of_another_shape_are_a_callers_mistake() -> None:
    made = plan(scenario(llm_layers=2, global_batch=2), [["llm.embed", "llm.0"], ["llm.1", "llm.head", "llm.loss"]])
    with pytest.raises(ValueError, match=r"loads are 1 x \[1\], the plan has 1 replicas x 2 microbatches"):
        lower(made, build_graph(made.scenario), [mean_step_loads(made)[0][:1]])


TOY = scenario(llm_layers=3, vision_layers=2, audio_layers=2, frozen_vision=True, global_batch=12, devices=64)
TOY_GRAPH = build_graph(TOY)


def random_cut(graph: ComputationGraph, cuts: list[int], stretch: list[float]) -> Plan:
    """Layers in topological order, cut at random places, with random stage times: any such cut is acyclic."""
    ids = [layer.id for layer in graph.layers()]
    edges = sorted({1 + cut % (len(ids) - 1) for cut in cuts})
    stages = [ids[a:b] for a, b in zip([0, *edges], [*edges, len(ids)], strict=True)]
    made = plan(TOY, stages, dp=2, microbatch_size=1)
    times = [(stretch[index % len(stretch)], stretch[-1 - index % len(stretch)]) for index in range(len(stages))]
    timed = [replace(s, forward_s=f, backward_s=b) for s, (f, b) in zip(made.stages, times, strict=True)]
    return replace(made, stages=tuple(timed))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    cuts=st.lists(st.integers(0, 100), min_size=1, max_size=7),
    stretch=st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0]), min_size=1, max_size=5),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
)
def test_no_cut_and_no_times_make_a_program_that_deadlocks_or_lacks_a_tensor(
    cuts: list[int], stretch: list[float], schedule: str
) -> None:
    made = replace(random_cut(TOY_GRAPH, cuts, stretch), schedule=schedule)
    program = lower(made, TOY_GRAPH, mean_step_loads(made))
    assert check_program(program) == ()
    assert check_tensors(made, TOY_GRAPH, program) == ()
    counts = Counter(action.kind for rank in program.ranks for action in rank.actions)
    assert counts["F"] == made.pp * made.microbatches
    assert counts["SEND"] == counts["RECV"]


def test_cross_attention_context_goes_once_to_every_stage_that_reads_it() -> None:
    """Llama 3.2 11B: 8 of 40 text layers read the projected image tokens; four stages hold some of them."""
    mllama = load_scenario(Path(__file__).parents[2] / "scenarios" / "llama-3.2-11b-vision.yaml")
    graph = build_graph(mllama)
    readers = [edge.consumer for edge in graph.edges() if edge.producer == "projector.0"]
    assert len(readers) == 8
    text = [layer.id for layer in graph.layers() if layer.module == "llm"]
    images = [layer.id for layer in graph.layers() if layer.module != "llm"]
    stages = [images, text[:11], text[11:21], text[21:31], text[31:]]
    stage_graph = build_stage_graph(stages, graph)
    assert stage_graph.depths == (5, 4, 3, 2, 1)  # images also feed the last stage; the longest path counts
    cuts = [cut for cut in stage_graph.cuts if cut.edge.producer == "projector.0"]
    assert [cut.target for cut in cuts] == [1, 2, 3, 4]
    for cut, layers in zip(cuts, stages[1:], strict=True):
        assert cut.edge.consumer == next(layer for layer in layers if layer in readers)


def test_states_of_inner_layers_go_to_the_stages_that_add_them_and_to_no_other() -> None:
    """Qwen3-VL: tokens of three inner vision blocks are added behind the first three text blocks, here on three stages;
    the last stage reads none of them. Each is as large as the merged tokens, and goes once."""
    scenario = load_scenario(Path(__file__).parents[2] / "scenarios" / "qwen3-vl-30b-a3b.yaml")
    graph, loads = build_graph(scenario), mean_loads(scenario, 1)
    text = [layer.id for layer in graph.layers() if layer.module == "llm"]
    images = [layer.id for layer in graph.layers() if layer.module != "llm"]
    cuts = build_stage_graph([images, text[:2], text[2:3], text[3:4], text[4:]], graph).cuts
    read = {target: [cut.edge for cut in cuts if (cut.source, cut.target) == (0, target)] for target in range(1, 5)}
    assert [len(read[target]) for target in range(1, 5)] == [2, 1, 1, 0]  # the first merges, and adds to its block
    assert all(graph.layer(edge.producer).module != "vision" for edges in read.values() for edge in edges)
    rows = round(loads["projector"].tokens)
    sizes = {edge_bytes(edge, loads, "bf16") for edges in read.values() for edge in edges}
    assert sizes == {rows * graph.layer("llm.0").output.width * 2}
