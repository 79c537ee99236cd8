"""How tensors cross between unlike meshes: bytes by overlap of intervals, the way by the links, beside compute."""

from dataclasses import replace

import pytest
from meshed_toys import job, meshed
from pipeline_toys import LINK, scenario

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.graph import ComputationGraph, Edge
from mmplan.cost_models.layout import Layout
from mmplan.cost_models.load import Load
from mmplan.planner.border import Border, TensorWay, Way, quickest, seen_shard, shard_of, ways_between, ways_s
from mmplan.planner.border_choice import border_choices
from mmplan.planner.check import check_plan
from mmplan.planner.check_meshes import check_meshes
from mmplan.planner.lower import lower
from mmplan.planner.mesh import Mesh, message_bytes, messages
from mmplan.planner.overlap import overlap_rate
from mmplan.planner.simulate import simulate
from mmplan.planner.step_loads import mean_step_loads
from mmplan.runtime.places import place_of, program_of_shard
from mmplan.scenario.cluster import Link
from mmplan.scenario.scenario import Scenario

# Two replicas of a vision encoder with an image of 197 tokens each, beside a language model on tp 4.
TWO = Mesh(modules=("vision",), tp=1, dp=2, first_rank=4)
FOUR = Mesh(modules=(), tp=4, dp=1, first_rank=0)
TOKENS = Edge(
    producer="vision.0", consumer="llm.embed", width=1024, load_module="vision", load_field="outputs", carries_grad=True
)
LOADS = {"vision": Load(outputs=197)}
WHOLE, SLICE = 197 * 1024 * 2, 50 * 1024 * 2  # of 197 rows over 4 ranks the largest slice has 50; bf16


def test_messages_of_two_replicas_to_tp_4_are_the_overlaps_of_their_rows() -> None:
    """A slice is what the interval of a sender's image and that of a reader have in common, the last one filled up."""
    sizes = {way: message_bytes(TOKENS, LOADS, "bf16", *Border(TWO, FOUR, way).seen) for way in ("copies", "slices")}
    assert sizes == {"copies": WHOLE, "slices": SLICE}
    sent: dict[Way, int] = {}
    for way in ways_between(TWO, FOUR):
        seen = Border(TWO, FOUR, way).seen
        ends = list(messages(*seen))
        sent[way] = len(ends) * message_bytes(TOKENS, LOADS, "bf16", *seen)
        shards = sorted(shard_of(taker, FOUR, way) for _, (_, taker) in ends)
        assert shards == ([0, 0] if way == "broadcast" else [0, 0, 1, 1, 2, 2, 3, 3])
        assert all(seen_shard(shard_of(shard, FOUR, way), FOUR, way) == shard for shard in range(seen[1].width))
    assert sent == {"copies": 8 * WHOLE, "slices": 8 * SLICE, "broadcast": 2 * WHOLE}
    assert [seen_shard(shard, FOUR, "broadcast") for shard in range(4)] == [0, None, None, None]


def test_slices_need_widths_of_which_one_divides_the_other() -> None:
    three = Mesh(modules=("vision",), tp=3, dp=1, first_rank=4)
    assert ways_between(three, FOUR) == ("copies", "broadcast")
    assert ways_between(TWO, replace(FOUR, tp=1)) == ways_between(TWO, TWO) == ("copies",)


def _joined(network: Link, node: Link = LINK) -> Scenario:
    """Nodes of four toy devices."""
    made = scenario(vision_layers=1, llm_layers=1)
    pool = replace(made.cluster.pools[0], nodes=2, devices_per_node=4, node_link=node)
    return replace(made, cluster=replace(made.cluster, pools=(pool,), network_link=network))


SLOW_TO_START = replace(LINK, latency_s=1e-4)
# Seconds of a message of WHOLE and of SLICE bytes without latency, and what tp ranks share of two images, on LINK:
W, S, SHARED = WHOLE / 1e10, SLICE / 1e10, 3e-6 + 3 / 4 * 8 * SLICE / 1e10


@pytest.mark.parametrize(
    ("network", "node", "expected", "best"),
    [
        # there 4 and back 2 whole messages; 4 slices each way and a gather; 2 messages each way and a broadcast, on the
        # quick link a scatter and a ring, 5 latencies and 3/2 of the bytes of both images
        (LINK, LINK, (6e-6 + 6 * W, 8e-6 + 8 * S + SHARED, 4e-6 + 4 * W + 5e-6 + 3 * W), "slices"),
        # where each message starts slowly, few of them are best
        (SLOW_TO_START, LINK, (6e-4 + 6 * W, 8e-4 + 8 * S + SHARED, 4e-4 + 4 * W + 5e-6 + 3 * W), "broadcast"),
        # and where those inside a node do too, nothing that follows pays: a broadcast is two rounds of a tree
        (
            SLOW_TO_START,
            SLOW_TO_START,
            (6e-4 + 6 * W, 8e-4 + 8 * S + 3e-4 + SHARED - 3e-6, 4e-4 + 4 * W + 2e-4 + 4 * W),
            "copies",
        ),
    ],
)
def test_the_quickest_way_follows_from_the_links(
    network: Link, node: Link, expected: tuple[float, ...], best: Way
) -> None:
    costs = AnalyticCostModel(_joined(network, node))
    layouts = Layout(tp=1, dp=2), Layout(tp=4)
    seconds = ways_s(costs, TOKENS, LOADS, "bf16", (TWO, FOUR), layouts, near=False)
    assert tuple(seconds.values()) == pytest.approx(expected)
    assert quickest(seconds) == best


ROWS = replace(FOUR, tp=1, cp=4)
MERGED = replace(TOKENS, placed="vision")


def test_rows_among_those_of_a_text_go_to_the_rank_with_their_place_alone() -> None:
    """197 x 1024 image tokens of two replicas among the rows of a text on four ranks: a slice of each image to each,
    4 messages each way; then each gives the others 3/4 of its own slices at one latency, instead of gathering those of
    all over three."""
    costs, layouts = AnalyticCostModel(_joined(LINK)), (Layout(tp=1, dp=2), Layout(cp=4))
    seconds = ways_s(costs, MERGED, LOADS, "bf16", (TWO, ROWS), layouts, near=False)
    assert seconds["copies"] == pytest.approx(8e-6 + 8 * S + 2 * (3e-6 + 3 / 4 * 8 * SLICE / 1e10))
    assert seconds["placed"] == pytest.approx(8e-6 + 8 * S + 2 * (1e-6 + 3 / 4 * 2 * SLICE / 1e10))
    assert quickest(seconds) == "placed"
    assert "placed" not in ways_s(costs, TOKENS, LOADS, "bf16", (TWO, ROWS), layouts, near=False)
    assert "placed" not in ways_between(TWO, FOUR, placed=True)


def test_a_larger_group_flips_the_choice() -> None:
    """Where a message takes 60 us to start, slices pay to tp 2, which get as many messages each way; to tp 4 these are
    too many. To a single rank there is but one way."""
    costs, best = AnalyticCostModel(_joined(replace(LINK, latency_s=6e-5))), dict[int, Way]()
    for tp in (1, 2, 4):
        ends, layouts = (TWO, replace(FOUR, tp=tp)), (Layout(tp=1, dp=2), Layout(tp=tp))
        best[tp] = quickest(ways_s(costs, TOKENS, LOADS, "bf16", ends, layouts, near=False))
    assert best == {1: "copies", 2: "slices", 4: "broadcast"}


SHAPE = {"vision": (1, 1), "llm": (2, 1), "microbatch": 4}


def _apart(link: Link) -> Scenario:
    made = job(devices=12)
    return replace(made, cluster=replace(made.cluster, network_link=link))


def test_a_plan_records_the_quickest_way_and_the_checker_counts_it() -> None:
    """On a slow network tp ranks send slices, and a plan that says otherwise is not the one whose seconds it has."""
    slow = replace(LINK, bytes_per_s=1e6)
    plans = {
        "slow": meshed(_apart(slow), vision=(2, 1), llm=(2, 2), microbatch=2),
        "slow to start": meshed(_apart(SLOW_TO_START), **SHAPE),  # type: ignore[arg-type]
    }
    assert [way.way for way in plans["slow"].ways] == ["slices"]
    assert [way.way for way in plans["slow to start"].ways] == ["broadcast"]
    for plan in plans.values():
        assert check_plan(plan) == ()
        graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
        (choice,) = border_choices(plan, graph, costs)
        assert choice.way == plan.ways[0].way == quickest(choice.seconds)
        other = replace(plan, ways=())
        assert {finding.rule for finding in check_plan(other)} == {"objective"}
        assert other.border(choice.tensor, 0, 1).way == "copies"
        assert simulate(other, graph, costs).step_time_s > simulate(plan, graph, costs).step_time_s


@pytest.mark.parametrize(
    ("producer", "reader", "message"),
    [
        ("vision.0", "llm", "vision.0 crosses to llm as slices, and llm reads no such layer"),
        ("llm.embed", "llm", "llm.embed crosses to llm as slices, and both are on one mesh"),
        (
            "vision_projector.0",
            "llm",
            "vision_projector.0 crosses to llm as slices between replicas of 3 and 2 ranks: "
            "of two widths one has to divide the other",
        ),
    ],
)
def test_ways_that_cannot_be_are_refused(producer: str, reader: str, message: str) -> None:
    plan = meshed(_apart(SLOW_TO_START), **SHAPE)  # type: ignore[arg-type]
    (mesh,) = plan.meshes
    way = TensorWay(producer=producer, reader=reader, way="slices")
    plan = replace(plan, ways=(way,), meshes=(replace(mesh, tp=3),))
    assert message in [finding.message for finding in check_plan(plan)]


@pytest.mark.parametrize(
    ("reader", "why"), [("one rank", "reads it on one rank"), ("states", "reads it not at places of its sequence")]
)
def test_rows_are_placed_only_where_a_sequence_lies_over_ranks(reader: str, why: str) -> None:
    plan = meshed(_apart(SLOW_TO_START), **SHAPE)  # type: ignore[arg-type]
    graph = build_graph(plan.scenario)
    if reader == "states":
        edges = [replace(edge, placed="") for edge in graph.edges()]
        plan, graph = replace(plan, tp=1, cp=2), ComputationGraph(graph.layers(), edges)
    way = TensorWay(producer="vision_projector.0", reader="llm", way="placed")
    found = [finding.message for finding in check_meshes(replace(plan, ways=(way,)), graph)]
    assert f"vision_projector.0 crosses to llm as placed, and llm {why}" in found


def test_every_rank_of_a_group_has_its_own_messages() -> None:
    """What all shards send and get adds up to what the program lists: slices for each, or all for the first."""
    plan = meshed(_apart(SLOW_TO_START), **SHAPE)  # type: ignore[arg-type]
    for way, shares in (("copies", 2), ("slices", 2), ("broadcast", 1)):
        one = replace(plan, ways=tuple(replace(known, way=way) for known in plan.ways))
        program = lower(one, build_graph(one.scenario), mean_step_loads(one))
        sent = got = 0
        for listed in program.ranks:
            width = one.mesh(listed.stage).width
            for shard in range(width):
                own = program_of_shard(one, listed, shard)
                assert place_of(one, own.rank).shard == shard
                crossing = [a for a in own.actions if a.tensor.startswith("vision_projector.0>")]
                sent += sum(action.bytes for action in crossing if action.kind == "SEND")
                got += sum(action.bytes for action in crossing if action.kind == "RECV")
        (choice,) = border_choices(one, build_graph(one.scenario), AnalyticCostModel(one.scenario))
        assert sent == got == shares * choice.message_bytes * one.microbatches


def test_features_of_a_microbatch_cross_beside_the_compute_of_others() -> None:
    """The encoder goes on with the next microbatch while what it made of one is under way, and readers with earlier
    ones: no compute waits for a link but for the tensors that it reads."""
    plan = meshed(_apart(replace(LINK, bytes_per_s=2e7)), **SHAPE)  # type: ignore[arg-type]
    prediction = simulate(plan, build_graph(plan.scenario), AnalyticCostModel(plan.scenario))
    encoder, reader = plan.rank(0, 0), plan.rank(1, 0)
    computes = [item for item in prediction.timeline if item.action.kind in "FB" and item.rank in (encoder, reader)]
    sends = [
        item
        for item in prediction.timeline
        if item.rank == encoder and item.action.kind == "SEND" and ">" in item.action.tensor
    ]
    assert len(sends) == plan.microbatches
    beside = {
        send.action.microbatch: {
            item.action.microbatch
            for item in computes
            if item.start_s < send.end_s
            and item.end_s > send.start_s
            and item.action.microbatch != send.action.microbatch
        }
        for send in sends
    }
    assert 1 in beside[0]  # the encoder is at the second while the first is under way
    assert sum(map(bool, beside.values())) > plan.microbatches // 2
    assert overlap_rate(prediction.timeline) > 0
