"""NCCL matches what two ranks send each other by order alone: it is the same on both of them, under every schedule."""

from collections import defaultdict
from collections.abc import Iterator

import pytest
from meshed_toys import job, meshed
from pipeline_toys import plan, scenario
from test_meshes import SHAPES

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.planner.lower import lower
from mmplan.planner.plan import Plan
from mmplan.planner.program import Program
from mmplan.planner.schedules.families import FAMILIES
from mmplan.planner.schedules.reschedule import with_family
from mmplan.planner.step_loads import drawn_step_loads, mean_step_loads
from mmplan.scenario.scenario import Sample
from mmplan.scenario.schedule_names import ScheduleName

VISION = ["vision.embed", "vision.0"]
AUDIO = ["audio.embed", "audio.0", "audio_projector.0"]
BRANCHED = (
    VISION,
    AUDIO,
    ["vision_projector.0", "llm.embed", *(f"llm.{layer}" for layer in range(3))],
    [*(f"llm.{layer}" for layer in range(3, 8)), "llm.head", "llm.loss"],
)
CHAIN = (
    [*VISION, *AUDIO, "vision_projector.0", "llm.embed", "llm.0"],
    ["llm.1", "llm.2"],
    ["llm.3", "llm.4", "llm.5"],
    ["llm.6", "llm.7", "llm.head", "llm.loss"],
)
# Some microbatches have no images, others no sound: their tensors are left out on both sides.
SAMPLES = (
    Sample(text_tokens=4, images=((8, 8),), audio_s=(0.1,)),
    Sample(text_tokens=5, audio_s=(0.1,)),
    Sample(text_tokens=3, images=((8, 8), (8, 8))),
)

Orders = dict[tuple[int, int], list[tuple[str, int, int]]]


def orders(program: Program) -> tuple[Orders, Orders]:
    """(sender, receiver) -> tensors, microbatches and bytes in the order of the sender, and in that of the receiver."""
    sent: Orders = defaultdict(list)
    received: Orders = defaultdict(list)
    for rank in program.ranks:
        for action in rank.actions:
            message = (action.tensor, action.microbatch, action.bytes)
            if action.kind == "SEND":
                sent[rank.rank, action.peer].append(message)
            elif action.kind == "RECV":
                received[action.peer, rank.rank].append(message)
    return sent, received


def of_family(name: ScheduleName) -> Iterator[Plan]:
    for stages in (BRANCHED, CHAIN):
        for dp in (1, 2):
            toy = scenario(llm_layers=8, vision_layers=1, audio_layers=1, manifest=SAMPLES, global_batch=8 * dp)
            made = with_family(plan(toy, list(stages), dp=dp), name, build_graph(toy), AnalyticCostModel(toy)).plan
            if made is not None:
                yield made


@pytest.mark.parametrize("name", FAMILIES)
def test_both_ranks_of_a_pair_have_one_order_under_every_schedule(name: ScheduleName) -> None:
    made = list(of_family(name))
    assert made, f"no plan here has the schedule {name}"
    for one in made:
        graph = build_graph(one.scenario)
        for loads in (mean_step_loads(one), drawn_step_loads(one, 1)):
            sent, received = orders(lower(one, graph, loads))
            assert sent == received and sum(map(len, sent.values())) > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_both_ranks_of_a_pair_have_one_order_between_unlike_meshes(shape: dict[str, object]) -> None:
    one = meshed(job(devices=24, global_batch=48 if shape is SHAPES[-1] else 32), **shape)  # type: ignore[arg-type]
    sent, received = orders(lower(one, build_graph(one.scenario), drawn_step_loads(one, 1)))
    assert sent == received and sent
