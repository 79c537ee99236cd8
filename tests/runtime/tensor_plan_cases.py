"""Plans whose stages split their layers over two ranks, and the code that their four processes run."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from case_processes import chosen
from gradient_cases import CPU, PROCESSES, cases, in_precisions, perturb, table_name, trained_weights
from meshed_plan_cases import meshed_cases, uneven_cases
from padded_plan_cases import padded_cases
from row_plan_cases import DEEP, ONE_STAGE, TALKER, attention_again, row_cases
from sequence_plan_cases import sequence_cases
from tiny_plans import AUDIO, TWO_STAGES, changed_module, hand_plan
from torch import Tensor

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layer import Layer
from mmplan.planner.lower import lower
from mmplan.planner.plan import Plan
from mmplan.planner.schedules.reschedule import refuse_unusable, with_family
from mmplan.planner.step_loads import drawn_step_loads
from mmplan.planner.tensor_traffic import tensor_bytes
from mmplan.runtime.ahead import Features, ahead_part
from mmplan.runtime.clock import WallClock
from mmplan.runtime.executor import run_step
from mmplan.runtime.groups import group_maker, replica_group, tensor_ranks
from mmplan.runtime.model import MultimodalModel
from mmplan.runtime.places import idle_program, listed_places, mesh_of_row, place_of, program_of_shard
from mmplan.runtime.stage import LayerStage
from mmplan.runtime.tensor_parallel import SplitLayer, name_in_whole, slice_of
from mmplan.runtime.tensor_sums import TensorRanks
from mmplan.runtime.train import build_stages, load_stages, step_data, tie_stages
from mmplan.scenario.scenario import Dtype, Optimizer, Scenario

TP = 2
MORE_PROCESSES = 5
VISION_AND_AUDIO = ("vision", "projector", "audio", "audio_projector")
STEP_LENGTH = 1e3  # so long that rounding of the weights hides nothing of their gradients
HALVES = (
    ("vision.embed", "vision.0-1", *AUDIO),
    ("vision.2-3", "projector.0", "llm.embed", "llm.0-5", "llm.head", "llm.loss"),
)


MIXED = (
    "two replicas that share weights, rows over tp",
    "LoRA language model, rows over tp",
    "cross-attention, rows over tp",
    "talker, rows over tp",
    "recomputed blocks, rows over tp",
    "two stages on a rank, backwards in two parts, rows over tp",
    "rows over cp, latent attention, rows over tp",
    "rows for heads, rows over tp",
    "experts over replicas, each over tp, rows over tp",
    "rows and columns of a talker",
    "gathered, rows on two ranks that share weights, a table on two stages",
    "gathered, rows on two ranks, recomputed, images dealt out",
    "gathered, rows and columns",
    "gathered, rows of a talker",
    "gathered, rows and columns of a talker",
    "gathered, rows, replicas and experts",
    "gathered, rows on four ranks, sliding windows and adapters",
    "gathered, patches over rows of text",
    "rows for heads, sliding windows and adapters",
    "rows for heads, a talker",
    "rows for heads, patches over rows of text",
    "an encoder in two stages dealt out",
    "dealt out, one replica whose ranks share states",
    "a projector dealt out",
    "patches, a projector in columns",
    "patches in two stages",
    "patches over rows of text",
    "patches of a frozen encoder",
    "patches, replicas that share weights",
    "in front of two stages, several microbatches at once",
    "an encoder in two stages dealt out, several microbatches at once",
    "gradients shared by replicas, several microbatches at once",
    "cross-attention, several microbatches at once",
    "all encoders, several microbatches at once",
    "a frozen encoder dealt out, a step ahead",
    "a frozen encoder in two stages, a step ahead",
    "weights shared by replicas, a step ahead",
    "kept on the host, several microbatches at once",
    "experts over replicas that share gradients",
    "experts over tp, replicas that share weights",
    "cross-attention, 2 replicas of encoders",
    "vision in two stages, recomputed",
    "a frozen encoder on tp 2",
    "vision in two stages, rows and clips on 2 ranks",
    "experts of an encoder over tp 2, language model on 2 replicas",
    "patches on 2 ranks, language model on 2 replicas",
    "images in turn on 2 ranks, cross-attention, 2 replicas",
    "patches on 2 ranks, their projector elsewhere",
    "slices from tp 2 to 2 replicas",
    "slices from tp 2 to rows on 2 ranks, cross-attention",
    "slices from patches on 2 ranks to tp 2",
    "broadcasts from patches on 2 ranks to tp 2",
    "a key head on two ranks, backwards in two parts",
    "key heads that tp does not divide",
    "a key head on two ranks, rows",
    "text in fp32, a projector dealt out",
    "vision in fp32, images dealt out over rows of text",
    "vision in fp32, dealt out, ranks share states",
    "a talker in fp32",
    "encoders on 2 replicas, language model on tp 2, text in fp32",
    "encoders on 2 replicas, language model on tp 2, vision in fp32",
    "encoders on tp 2, language model on 2 replicas, text in fp32",
    "cross-attention, 2 replicas of encoders, vision in fp32",
)


def tensor_cases() -> dict[str, Plan]:
    """Name -> plan; models and microbatches of the pipelines' cases."""
    models: dict[str, Scenario] = {name: plan.scenario for name, plan in cases().items()}
    tiny = models["1f1b"]
    chain = hand_plan(replace(tiny, global_batch=8), TWO_STAGES)
    folded = with_family(chain, "zb-v", build_graph(chain.scenario), AnalyticCostModel(chain.scenario))
    recomputed = hand_plan(tiny, TWO_STAGES)
    stages = tuple(replace(stage, recompute="half") for stage in recomputed.stages)
    plans = {
        "two stages": hand_plan(tiny, TWO_STAGES),
        "two replicas": hand_plan(tiny, ONE_STAGE, dp=2),
        "two replicas that share optimizer state": replace(hand_plan(tiny, ONE_STAGE, dp=2), sharding="optimizer"),
        "two replicas that share weights": replace(hand_plan(tiny, ONE_STAGE, dp=2), sharding="parameters"),
        "frozen vision encoder": hand_plan(models["frozen vision encoder"], TWO_STAGES),
        "LoRA language model": hand_plan(models["LoRA language model"], TWO_STAGES),
        "cross-attention": hand_plan(models["cross-attention in two stages"], TWO_STAGES),
        "experts, latent attention and DeepStack": hand_plan(models["experts, latent attention and DeepStack"], DEEP),
        "talker": hand_plan(models["talker"], TALKER, microbatch_size=2),
        "recomputed blocks": replace(recomputed, stages=stages),
        "a table on two stages": hand_plan(models["a table on two stages"], TWO_STAGES),
        "two stages on a rank, backwards in two parts": refuse_unusable(folded),
    }
    split = {name: replace(plan, tp=TP) for name, plan in plans.items()}
    every = {
        **split,
        **row_cases(models),
        **sequence_cases(models, plans),
        **_dealt_cases(models),
        **_patch_cases(models),
        **_together_cases(models),
        **_ahead_cases(models["frozen vision encoder"]),
        **_expert_cases(models["experts, latent attention and DeepStack"]),
        **padded_cases(models, plans["two stages on a rank, backwards in two parts"]),
        **meshed_cases(models),
        **_unlike_precisions(models),
    }
    return chosen(every, MIXED)


def _dealt_cases(models: dict[str, Scenario]) -> dict[str, Plan]:
    """Encoders whole on both ranks, each with some of the images and clips."""
    tiny, encoders = models["1f1b"], ("vision", "projector", "audio", "audio_projector")
    plans = {
        "images and clips dealt out": hand_plan(models["cross-attention in two stages"], TWO_STAGES),
        "an encoder in two stages dealt out": hand_plan(tiny, HALVES),
        "dealt out, two replicas that share weights": replace(
            hand_plan(tiny, ONE_STAGE, dp=2, microbatch_size=3), sharding="parameters"
        ),
        # with one replica only what is dealt out has several holders
        "dealt out, one replica whose ranks share states": replace(hand_plan(tiny, HALVES), sharding="optimizer"),
        "dealt out, one replica whose ranks share weights": replace(hand_plan(tiny, TWO_STAGES), sharding="parameters"),
    }
    dealt = {name: replace(plan, tp=TP, spread=encoders) for name, plan in plans.items()}
    return {**dealt, "a projector dealt out": replace(hand_plan(tiny, TWO_STAGES), tp=TP, spread=("projector",))}


def _patch_cases(models: dict[str, Scenario]) -> dict[str, Plan]:
    """Rows of all images on every rank that shares a stage."""
    tiny, encoders = models["1f1b"], ("vision", "projector", "audio", "audio_projector")
    one = hand_plan(tiny, ONE_STAGE, microbatch_size=2)
    recomputed = tuple(replace(stage, recompute="full") for stage in one.stages)
    beside = replace(hand_plan(tiny, TWO_STAGES), tp=TP, patches=("vision",))
    halves = replace(hand_plan(tiny, HALVES), tp=TP, patches=("vision",))
    frozen = hand_plan(models["frozen vision encoder"], TWO_STAGES)
    deep = hand_plan(models["experts, latent attention and DeepStack"], DEEP)
    shared = hand_plan(tiny, ONE_STAGE, dp=2, microbatch_size=3)
    return {
        "patches, a projector with images": replace(beside, spread=encoders),
        "patches, a projector in columns": replace(beside, spread=("vision",)),
        "patches in two stages": replace(halves, spread=encoders),
        "patches and rows, recomputed": replace(
            one, tp=TP, cp=2, spread=encoders, patches=("vision", "audio"), stages=recomputed
        ),
        "patches over rows of text": replace(one, cp=4, spread=("vision",), patches=("vision",)),
        "patches in windows, norms of heads": attention_again(
            replace(
                changed_module(beside, "vision", window_tokens=24, global_layers=(2,), qk_norm=True), spread=encoders
            )
        ),
        "patches of a frozen encoder": replace(frozen, tp=TP, spread=encoders, patches=("vision",)),
        "patches under DeepStack": replace(deep, tp=TP, spread=("vision", "projector", "deep"), patches=("vision",)),
        "patches, replicas that share weights": replace(
            shared, tp=TP, spread=encoders, patches=("vision",), sharding="parameters"
        ),
    }


def _together_cases(models: dict[str, Scenario]) -> dict[str, Plan]:
    """Encoders that run once for several microbatches."""
    tiny, vision = models["1f1b"], ("vision", "projector")
    encoders = (*vision, "audio", "audio_projector")
    frozen, crossing = models["frozen vision encoder"], models["cross-attention in two stages"]
    deep = models["experts, latent attention and DeepStack"]
    plans = {
        "beside the language model": replace(hand_plan(tiny, ONE_STAGE, dp=2), tp=TP),
        "in front of two stages": replace(hand_plan(tiny, TWO_STAGES), tp=TP),
        "an encoder in two stages": replace(hand_plan(tiny, HALVES), tp=TP),
        "an encoder in two stages dealt out": replace(hand_plan(tiny, HALVES), tp=TP, spread=encoders),
        "weights shared by replicas": replace(hand_plan(tiny, HALVES, dp=2), sharding="parameters"),
        "gradients shared by replicas": replace(hand_plan(tiny, ONE_STAGE, dp=2), tp=TP, sharding="gradients"),
        "a frozen encoder": replace(hand_plan(frozen, HALVES), tp=TP),
        "cross-attention": replace(hand_plan(crossing, TWO_STAGES), tp=TP, spread=encoders),
        "patches and rows of text": replace(hand_plan(tiny, TWO_STAGES), cp=2, spread=("vision",), patches=("vision",)),
    }
    batched = {name: replace(plan, together=vision, batch_factor=3) for name, plan in plans.items()}
    under = replace(hand_plan(deep, DEEP), tp=TP, together=(*vision, "deep"), batch_factor=2)
    every = replace(hand_plan(tiny, TWO_STAGES), tp=TP, together=encoders, batch_factor=2)
    again = tuple(replace(stage, recompute="full") for stage in every.stages)
    more = {"under DeepStack": under, "all encoders": every, "all encoders, recomputed": replace(every, stages=again)}
    technique = replace(tiny.technique, offload="activations")
    more["kept on the host"] = replace(every, scenario=replace(tiny, technique=technique))
    return {f"{name}, several microbatches at once": plan for name, plan in (batched | more).items()}


def _ahead_cases(frozen: Scenario) -> dict[str, Plan]:
    """A frozen encoder that runs the next step's batch."""
    vision, front, ends = ("vision.embed", "vision.0-3"), ("projector.0", *AUDIO, "llm.embed"), ("llm.head", "llm.loss")
    stages = vision, (*front, "llm.0-5", *ends)
    four = ("vision.embed", "vision.0-1"), ("vision.2-3",), (*front, "llm.0-2"), ("llm.3-5", *ends)
    chain = hand_plan(frozen, stages)
    plans = {
        "a frozen encoder": replace(chain, tp=TP),
        "a frozen encoder dealt out": replace(chain, tp=TP, spread=("vision", "projector", "audio", "audio_projector")),
        "a frozen encoder in two stages": hand_plan(frozen, four),
        "weights shared by replicas": replace(hand_plan(frozen, stages, dp=2), sharding="parameters"),
    }
    return {f"{name}, a step ahead": replace(plan, prefetch=("vision",)) for name, plan in plans.items()}


def _unlike_precisions(models: dict[str, Scenario]) -> dict[str, Plan]:
    """Encoders in fp32 beside text in bf16, and the reverse: sums, gathers and messages in the types of both."""
    tiny, encoders = models["1f1b"], VISION_AND_AUDIO
    wide: dict[str, Dtype] = {"vision": "fp32", "projector": "fp32"}
    eyes, text = in_precisions(tiny, **wide), in_precisions(tiny, llm="fp32", audio="fp32")
    crossed = in_precisions(models["cross-attention in two stages"], **wide)
    meshes = meshed_cases({**models, "1f1b": eyes, "cross-attention in two stages": crossed})
    reverse = meshed_cases({**models, "1f1b": text})
    rows = replace(hand_plan(eyes, TWO_STAGES, microbatch_size=2), cp=2, spread=encoders)
    plans = {
        "vision in fp32": replace(hand_plan(eyes, TWO_STAGES), tp=TP),
        "text in fp32, a projector dealt out": replace(hand_plan(text, TWO_STAGES), tp=TP, spread=("projector",)),
        "vision in fp32, images dealt out over rows of text": rows,
        "vision in fp32, dealt out, ranks share states": replace(
            hand_plan(eyes, HALVES), tp=TP, spread=encoders, sharding="optimizer"
        ),
        "a talker in fp32": replace(
            hand_plan(in_precisions(models["talker"], talker="fp32"), TALKER, microbatch_size=2), cp=2
        ),
    }
    for name in ("encoders on 2 replicas, language model on tp 2", "encoders on tp 2, language model on 2 replicas"):
        plans |= {f"{name}, text in fp32": reverse[name], f"{name}, vision in fp32": meshes[name]}
    crossing = "cross-attention, 2 replicas of encoders"
    return {**plans, f"{crossing}, vision in fp32": meshes[crossing]}


def _expert_cases(experts: Scenario) -> dict[str, Plan]:
    """Experts on more ranks than the rest of their layers."""
    chain, one = (
        hand_plan(experts, DEEP, dp=2),
        hand_plan(experts, (tuple(id for stage in DEEP for id in stage),), dp=2),
    )
    stages = tuple(replace(stage, recompute="full") for stage in chain.stages)
    return {
        "experts over replicas, recomputed": replace(chain, ep=2, stages=stages),
        "experts over replicas that share gradients": replace(chain, ep=2, sharding="gradients"),
        "experts over replicas, each over tp": replace(one, tp=2, ep=2, etp=2),
        "an expert on each rank": replace(one, tp=2, ep=4),
        "experts over tp, replicas that share weights": replace(one, tp=2, ep=2, sharding="parameters"),
    }


class PerturbedPart(MultimodalModel):
    """This rank's part of a model with noise on every weight."""

    def __init__(
        self,
        layers: Sequence[Layer],
        graph: ComputationGraph,
        *,
        precision: str,
        seed: int,
        device: torch.device,
        ranks: TensorRanks | None = None,
    ) -> None:
        super().__init__(layers, graph, precision=precision, seed=seed, device=device, ranks=ranks)
        whole = MultimodalModel(layers, graph, precision=precision, seed=seed, device=device)
        perturb(whole)
        weights = dict(whole.named_parameters())
        for name, parameter in self.named_parameters():
            own = weights[name_in_whole(name)].detach()
            parameter.data.copy_(slice_of(own, parameter.shape, *extent_in(self, name, own.shape)))


def extent_in(model: MultimodalModel, name: str, whole: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Where the rank's part of the whole model's parameter begins and ends."""
    _, layer, of_layer = name.split(".", 2)
    module = model.layers[layer]
    return module.extent(of_layer, whole) if isinstance(module, SplitLayer) else ((0,) * len(whole), whole)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRankResult:
    """Gradients by parameter name, losses and bytes of one rank."""

    index: int
    gradients: dict[str, Tensor]
    places: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    losses: dict[str, float]
    tensor_bytes: int
    planned_tensor_bytes: int
    sent_bytes: int
    planned_sent_bytes: int | None  # of ranks that the program lists


def run_tensor_rank(plan: Plan, rank: int, control: dist.ProcessGroup) -> TensorRankResult:
    """One step of plain gradient descent."""
    optimizer = Optimizer(name="sgd", learning_rate=STEP_LENGTH)
    plan = replace(plan, scenario=replace(plan.scenario, optimizer=optimizer))
    graph = build_graph(plan.scenario)
    timeout = timedelta(seconds=30)
    replicas = replica_group(plan, rank, "gloo", timeout)
    ranks = tensor_ranks(plan, rank, "gloo", timeout)
    if rank not in listed_places(plan):
        return _idle(rank, control)
    place, loads = place_of(plan, rank), drawn_step_loads(plan, 0)
    whole_program = lower(plan, graph, loads)
    listed = listed_places(plan)[rank]
    program = program_of_shard(plan, whole_program.ranks[listed], place.shard)
    with patch("mmplan.runtime.train.MultimodalModel", PerturbedPart):
        stages = build_stages(plan, graph, place.row, CPU, ranks, replicas)
    tie_stages(plan, graph, stages, group_maker(rank, "gloo", timeout))
    before: dict[str, Tensor] = {}
    for index, stage in stages.items():
        before |= trained_weights(stage, plan.stages[index].layers)
    clock = WallClock(control, one_host=True)
    clock.start()
    features = _features(plan, rank, 0, stages, clock)
    already_bytes = 0 if ranks is None else ranks.total_bytes
    load_stages(plan, stages, place, 0, CPU)
    record = run_step(program, stages, device=CPU, clock=clock, features=features)
    made_bytes = 0 if ranks is None else ranks.total_bytes - already_bytes
    losses = {module: loss for stage in stages.values() for module, loss in stage.losses().items()}
    _require_equal(features, _features(plan, rank, 1, stages, clock))
    sends = [action for action in whole_program.ranks[listed].actions if action.kind == "SEND"]
    after: dict[str, Tensor] = {}
    for index, stage in stages.items():
        after |= trained_weights(stage, plan.stages[index].layers)
    return TensorRankResult(
        index=place.shard % mesh_of_row(plan, place.row).tp,
        places={
            table_name(stage.model, name): (
                stage.places[parameter].offset,
                stage.places[parameter].limit or stage.places[parameter].shape,
            )
            for stage in stages.values()
            for name, parameter in stage.model.named_parameters()
            for place in (stage.places[parameter],)
        },
        gradients={name: (weight - after[name]) / STEP_LENGTH for name, weight in before.items()},
        losses=losses,
        tensor_bytes=made_bytes,
        planned_tensor_bytes=tensor_bytes(plan, graph, whole_program, loads)[listed],
        sent_bytes=record.activation_bytes + record.gradient_bytes,
        planned_sent_bytes=sum(a.bytes * a.copies for a in sends) if place.shard == 0 else None,
    )


def _features(plan: Plan, rank: int, step: int, stages: Mapping[int, LayerStage], clock: WallClock) -> Features:
    """What a rank has of a step's features before it begins."""
    features = Features()
    if plan.prefetch:
        place, loads = place_of(plan, rank), step_data(plan, step).loads
        listed = lower(plan, build_graph(plan.scenario), loads).ranks[listed_places(plan)[rank]]
        load_stages(plan, stages, place, step, CPU, ahead=0)
        part = ahead_part(plan, program_of_shard(plan, listed, place.shard))
        run_step(part, stages, device=CPU, clock=clock, features=features)
    return features


def _require_equal(made: Features, expected: Features) -> None:
    """What a step has made for the next one is what that would have made itself."""
    assert made.received.keys() == expected.received.keys()
    for key, messages in made.received.items():
        for (_, own), (_, other) in zip(messages, expected.received[key], strict=True):
            assert torch.equal(own.there(), other.there()), key


def _idle(rank: int, control: dist.ProcessGroup) -> TensorRankResult:
    """A step of a rank without a stage."""
    clock = WallClock(control, one_host=True)
    clock.start()
    record = run_step(idle_program(rank), {}, device=CPU, clock=clock)
    return TensorRankResult(
        index=0,
        gradients={},
        places={},
        losses={},
        tensor_bytes=0,
        planned_tensor_bytes=0,
        sent_bytes=record.activation_bytes + record.gradient_bytes,
        planned_sent_bytes=0,
    )


def run_tensor_cases(rank: int, folder: str) -> None:
    """Body of one of the four processes; writes its results to `folder`."""
    _run_cases(rank, folder, tensor_cases(), PROCESSES)


def run_uneven_cases(rank: int, folder: str) -> None:
    """The same of five."""
    _run_cases(rank, folder, uneven_cases(cases()["1f1b"].scenario), MORE_PROCESSES)


def _run_cases(rank: int, folder: str, plans: dict[str, Plan], processes: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes, timeout=timedelta(seconds=30))
    world = dist.new_group(range(processes))
    results = {name: run_tensor_rank(plan, rank, world) for name, plan in plans.items()}
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
