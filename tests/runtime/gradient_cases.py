"""Pipelines whose gradients are compared with one process, and the code that its four processes run."""

import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from tiny_plans import AUDIO, FOUR_STAGES, TWO_STAGES, VISION, hand_plan, tiny_scenario
from torch import Tensor

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.layout import RecomputeLevel
from mmplan.cost_models.planned_memory import planned_state_bytes
from mmplan.cost_models.ties import table_of
from mmplan.planner.lower import lower
from mmplan.planner.plan import Plan
from mmplan.planner.schedules.reschedule import optimized, refuse_unusable, with_family
from mmplan.runtime.clock import WallClock
from mmplan.runtime.executor import run_step
from mmplan.runtime.groups import group_maker
from mmplan.runtime.model import MultimodalModel, module_path
from mmplan.runtime.network import all_reduce
from mmplan.runtime.places import Place, mesh_of_row
from mmplan.runtime.stage import LayerStage
from mmplan.runtime.train import build_stages, step_data, step_microbatches, tie_stages
from mmplan.runtime.weighted_stage import WeightedStage
from mmplan.scenario.attention_forms import Mla
from mmplan.scenario.scenario import (
    Distribution,
    Dtype,
    Model,
    ModelEdge,
    ModelModule,
    Moe,
    Optimizer,
    Scenario,
    Training,
    Transformer,
    Vocabulary,
)
from mmplan.scenario.schedule_names import ScheduleName
from mmplan.scenario.technique import SHARDINGS

ODD_STAGES = (
    ("vision.embed", "vision.0-2", *AUDIO),
    ("vision.3", "projector.0", "llm.embed", "llm.0-5", "llm.head", "llm.loss"),
)
TIED_STAGES = ((*VISION, *AUDIO), ("llm.embed", "llm.0-5", "llm.head", "llm.loss"))
CHAIN_STAGES = (
    (*VISION, *AUDIO),
    ("llm.embed", "llm.0-1"),
    ("llm.2-3",),
    ("llm.4-5", "llm.head", "llm.loss"),
)
PROCESSES = 4
TABLE_ON_TWO, LEFT_OUT = "a table on two stages, sharding none", "the sum over two stages left out"
WRONG_SCALE, NO_WEIGHTS, STALE = "gradients times 1 / dp", "a weight gradient left out", "stale features"
# Errors put in on purpose, and the case that each is put into.
FAULTS = {WRONG_SCALE: "two replicas", NO_WEIGHTS: "zb-1p", STALE: "1f1b"}
STEP_LENGTH = 2.0**20
CPU = torch.device("cpu")


def _with_training(scenario: Scenario, trainings: Mapping[str, Training]) -> Scenario:
    modules = tuple(replace(m, training=trainings.get(m.name, m.training)) for m in scenario.model.modules)
    return replace(scenario, model=replace(scenario.model, modules=modules))


def _cross_attention(scenario: Scenario) -> Scenario:
    """Vision tokens are read by llm layers 1 and 4 instead of being merged; audio is merged as before."""
    llm = scenario.model.module("llm")
    assert llm.transformer is not None
    crossed = replace(llm, transformer=replace(llm.transformer, cross_layers=(1, 4), cross_width=128))
    modules = tuple(crossed if m.name == "llm" else m for m in scenario.model.modules)
    edges = tuple(replace(e, kind="cross_attention") if e.producer == "projector" else e for e in scenario.model.edges)
    return replace(scenario, model=replace(scenario.model, modules=modules, edges=edges))


def _talker(scenario: Scenario) -> Scenario:
    """A second language model reads the last states of the first, which so feed two stages."""
    shape = Transformer(
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn=128,
        gated_mlp=True,
        causal=True,
        norm="rms",
    )
    talker = ModelModule(
        name="talker",
        kind="language_model",
        modality="speech",
        transformer=shape,
        vocabulary=Vocabulary(size=96),
    )
    edges = (*scenario.model.edges, ModelEdge(producer="llm", consumer="talker", kind="hidden"))
    model = Model(name="talking", modules=(*scenario.model.modules, talker), edges=edges)
    speech = Distribution(values=(0.0, 12.0, 20.0), weights=(0.25, 0.5, 0.25))
    return replace(scenario, model=model, data=replace(scenario.data, speech_tokens=speech))


def _experts(scenario: Scenario) -> Scenario:
    """Experts and latent attention in the language model; its merged tokens get those of vision block 1 added behind
    block 3, two stages further on."""
    llm, projector = scenario.model.module("llm"), scenario.model.module("projector")
    assert llm.transformer is not None
    moe = Moe(experts=4, topk=2, expert_ffn=48, shared_ffn=32, first_dense=1, scoring="sigmoid")
    mla = Mla(q_lora=40, kv_lora=24, qk_nope=16, qk_rope=16, v_dim=32)
    routed = replace(llm, transformer=replace(llm.transformer, moe=moe, mla=mla))
    modules = tuple(routed if m.name == "llm" else m for m in scenario.model.modules)
    edges = (
        ModelEdge(producer="vision", consumer="deep", kind="input", producer_layer=1),
        ModelEdge(producer="deep", consumer="llm", kind="add", consumer_layer=3),
    )
    model = replace(
        scenario.model, modules=(*modules, replace(projector, name="deep")), edges=(*scenario.model.edges, *edges)
    )
    return replace(scenario, model=model)


def cases() -> dict[str, Plan]:
    """Name -> plan; every one has microbatches without images among those with."""
    tiny = replace(tiny_scenario(), global_batch=6)
    frozen = _with_training(tiny, {"vision": Training(mode="frozen")})
    frozen_all = _with_training(tiny, {"vision": Training(mode="frozen"), "projector": Training(mode="frozen")})
    lora = Training(mode="lora", rank=4, targets=("q", "v", "down"))
    adapted = _with_training(tiny, {"llm": lora})
    cross_stages = (VISION, (*AUDIO, "llm.embed", "llm.0-1"), ("llm.2-4",), ("llm.5", "llm.head", "llm.loss"))
    talker_stages = (
        (*VISION, *AUDIO),
        ("llm.embed", "llm.0-5"),
        ("llm.head", "llm.loss"),
        ("talker.embed", "talker.0-1", "talker.head", "talker.loss"),
    )
    return {
        "1f1b": hand_plan(tiny, FOUR_STAGES),
        "gpipe": hand_plan(tiny, FOUR_STAGES, schedule="gpipe"),
        "two samples in a microbatch": hand_plan(tiny, FOUR_STAGES, microbatch_size=2),
        "frozen vision encoder": hand_plan(frozen, FOUR_STAGES),
        "frozen vision stage": hand_plan(frozen_all, FOUR_STAGES),
        "LoRA language model": hand_plan(adapted, FOUR_STAGES),
        "two replicas": hand_plan(tiny, TWO_STAGES, dp=2),
        "activations in host memory, two replicas that share weights": replace(
            hand_plan(_on_host(tiny), TWO_STAGES, dp=2), sharding="parameters"
        ),
        "activations in host memory, every second block recomputed": _recomputing(
            hand_plan(_on_host(_experts(tiny)), ((*VISION, "deep.0"), *FOUR_STAGES[1:])), "half"
        ),
        "balanced samples": replace(
            hand_plan(replace(tiny, global_batch=16), TWO_STAGES, dp=2, microbatch_size=2), composition="balance"
        ),
        "cross-attention in two stages": hand_plan(_cross_attention(tiny), cross_stages),
        "experts, latent attention and DeepStack": hand_plan(_experts(tiny), ((*VISION, "deep.0"), *FOUR_STAGES[1:])),
        "talker": hand_plan(_talker(tiny), talker_stages),
        "recomputed blocks": _recomputing(hand_plan(tiny, FOUR_STAGES), "full"),
        "half of the blocks recomputed, LoRA": _recomputing(hand_plan(adapted, TWO_STAGES, dp=2), "half"),
        **_sharded(tiny),
        "recomputed behind a frozen stage": _recomputing(hand_plan(frozen_all, FOUR_STAGES), "3 of 8"),
        **_scheduled(tiny, adapted, frozen_all),
        **_over_stages(_tied(tiny)),
        **_in_unlike_precisions(tiny),
    }


def in_precisions(scenario: Scenario, **said: Dtype) -> Scenario:
    """Modules that are not named are in bf16, for which this processor has no rate of its own."""
    (pool,) = scenario.cluster.pools
    pool = replace(pool, device=replace(pool.device, bf16_flops_per_s=pool.device.fp32_flops_per_s))
    modules = tuple(replace(module, precision=said.get(module.name, "bf16")) for module in scenario.model.modules)
    model, cluster = replace(scenario.model, modules=modules), replace(scenario.cluster, pools=(pool,))
    return replace(scenario, precision="bf16", model=model, cluster=cluster)


def _in_unlike_precisions(tiny: Scenario) -> dict[str, Plan]:
    """Casts inside a stage and between stages, and buffers of two types in one stage."""
    wide_eyes = in_precisions(tiny, vision="fp32", projector="fp32")
    wide_text = in_precisions(tiny, llm="fp32", audio_projector="fp32")
    crossed = in_precisions(_cross_attention(tiny), vision="fp32", projector="fp32")
    return {
        "vision in fp32, text in bf16": hand_plan(wide_eyes, FOUR_STAGES),
        "vision in bf16, text in fp32": hand_plan(wide_text, FOUR_STAGES),
        "vision in fp32, cross-attention in bf16, recomputed": _recomputing(
            hand_plan(crossed, TWO_STAGES, dp=2), "full"
        ),
        **{
            f"vision in fp32, text in bf16, sharding {sharding}": replace(
                hand_plan(wide_eyes, TWO_STAGES, dp=2), sharding=sharding
            )
            for sharding in SHARDINGS
        },
    }


def _on_host(scenario: Scenario) -> Scenario:
    return replace(scenario, technique=replace(scenario.technique, offload="activations"))


def _over_stages(tied: Scenario) -> dict[str, Plan]:
    """A head that reads the token table of another stage."""
    chain = hand_plan(replace(tied, global_batch=8), CHAIN_STAGES)
    graph, costs = build_graph(chain.scenario), AnalyticCostModel(chain.scenario)
    frozen = _with_training(tied, {"llm": Training(mode="frozen")})
    two = _talker(tied)
    talker = two.model.module("talker")
    assert talker.vocabulary is not None
    two = _with_module(two, replace(talker, vocabulary=replace(talker.vocabulary, tied=True)))
    three = (
        (*VISION, *AUDIO),
        ("llm.embed", "llm.0-5"),
        ("llm.head", "llm.loss", "talker.embed"),
        ("talker.0-1", "talker.head", "talker.loss"),
    )
    return {
        "two tables on three stages": hand_plan(two, three),
        "a table on two stages": hand_plan(tied, FOUR_STAGES),
        "a table on two stages of one rank": refuse_unusable(with_family(chain, "zb-v", graph, costs)),
        "a table on two stages, chunks": refuse_unusable(with_family(chain, "interleaved", graph, costs)),
        "a frozen table on two stages": replace(hand_plan(frozen, TWO_STAGES, dp=2), sharding="parameters"),
        **{
            f"a table on two stages, sharding {sharding}": replace(hand_plan(tied, TWO_STAGES, dp=2), sharding=sharding)
            for sharding in SHARDINGS
        },
    }


def _recomputing(plan: Plan, level: RecomputeLevel) -> Plan:
    return replace(plan, stages=tuple(replace(stage, recompute=level) for stage in plan.stages))


def _sharded(tiny: Scenario) -> dict[str, Plan]:
    """Each ZeRO stage on two replicas of two stages: odd numbers of parameters, recomputation, frozen modules beside
    adapters, and a matrix that two layers share."""
    still, adapters = Training(mode="frozen"), Training(mode="lora", rank=4, targets=("q", "v", "down"))
    adapted = _with_training(tiny, {"vision": still, "projector": still, "llm": adapters})
    found = {}
    for sharding in SHARDINGS[1:]:
        plans = {
            "sharded, odd": _recomputing(hand_plan(_with_odd_encoder(tiny), ODD_STAGES, dp=2), "half"),
            "sharded, frozen and LoRA": hand_plan(adapted, TWO_STAGES, dp=2),
            "sharded, tied": hand_plan(_tied(tiny), TIED_STAGES, dp=2),
        }
        found |= {f"{sharding} {title}": replace(plan, sharding=sharding) for title, plan in plans.items()}
    return found


def _tied(scenario: Scenario) -> Scenario:
    """The head reads the token table."""
    llm = scenario.model.module("llm")
    assert llm.vocabulary is not None
    return _with_module(scenario, replace(llm, vocabulary=replace(llm.vocabulary, tied=True)))


def _with_odd_encoder(scenario: Scenario) -> Scenario:
    """Each block of the vision encoder has an odd number of biases, so two replicas have no equal shares."""
    vision = scenario.model.module("vision")
    assert vision.transformer is not None
    return _with_module(scenario, replace(vision, transformer=replace(vision.transformer, ffn=255)))


def _with_module(scenario: Scenario, changed: ModelModule) -> Scenario:
    modules = tuple(changed if m.name == changed.name else m for m in scenario.model.modules)
    return replace(scenario, model=replace(scenario.model, modules=modules))


def _scheduled(tiny: Scenario, adapted: Scenario, frozen: Scenario) -> dict[str, Plan]:
    """Split backwards, several chunks per rank, and orders of the search; each on the plan that its family is for."""
    chain = hand_plan(replace(tiny, global_batch=8), CHAIN_STAGES)
    wanted: tuple[tuple[str, Plan, ScheduleName], ...] = (
        ("zb-1p", chain, "zb-1p"),
        ("zb-v", chain, "zb-v"),
        ("interleaved", chain, "interleaved"),
        ("dualpipe-v", chain, "dualpipe-v"),
        ("encoders in bubbles", hand_plan(tiny, FOUR_STAGES), "encoders-in-bubbles"),
        ("split backward with LoRA", hand_plan(adapted, FOUR_STAGES), "depth-first"),
        ("split backward behind a frozen stage", hand_plan(frozen, FOUR_STAGES), "depth-first"),
    )
    found = {}
    for title, plan, name in wanted:
        costs = AnalyticCostModel(plan.scenario)
        found[title] = refuse_unusable(with_family(plan, name, build_graph(plan.scenario), costs))
    plan = hand_plan(tiny, FOUR_STAGES)
    # All processes must find the same orders: the bound ends this search, not the time limit.
    found["optimized"] = optimized(plan, build_graph(tiny), AnalyticCostModel(tiny), search_s=5.0)
    return found


def table_name(model: MultimodalModel, name: str) -> str:
    """The parameter's name in the whole model: of a copy of a token table that one's."""
    heads = {module_path(layer.id): table for layer in model._order if (table := table_of(layer)) is not None}
    path = name.removesuffix(".parts.head.weight")
    return f"{module_path(heads[path])}.parts.table.weight" if path in heads else name


def perturb(model: MultimodalModel) -> None:
    """Deterministic noise on every weight, so that LoRA's zero matrices do not hide gradients."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(table_name(model, name).encode()))
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """Gradients by parameter name, losses, and bytes of one rank: sent, given to collectives among replicas, and of
    state after the step; each with what was planned."""

    gradients: dict[str, Tensor]
    losses: dict[str, float]
    sent_bytes: int
    shared_bytes: int
    state_bytes: int
    program_bytes: int
    program_shared_bytes: int
    planned_state_bytes: int


def whole_model(plan: Plan) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients, summed in fp32, and losses of one process that runs all microbatches of all replicas."""
    graph = build_graph(plan.scenario)
    model = MultimodalModel(graph.layers(), graph, precision="fp32", seed=plan.scenario.seed, device=CPU)
    perturb(model)
    data = step_data(plan, 0)
    raw_modules = [module.name for module in plan.scenario.model.modules if module.projector is None]
    losses, sums = dict[str, float](), dict[str, Tensor]()
    for replica in range(mesh_of_row(plan, 0).dp):
        for batch in step_microbatches(plan, data, Place(0, replica, 0), raw_modules, CPU):
            parts = model(batch)
            torch.stack([loss.float() for loss in parts.values()]).sum().backward()
            for module, loss in parts.items():
                losses[module] = losses.get(module, 0.0) + loss.item()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    sums[name] = sums.get(name, 0) + parameter.grad.float()
                    parameter.grad = None
    return sums, losses


class _Perturbed(MultimodalModel):
    """Noisy before any rank takes its share."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        perturb(self)


def trained_weights(stage: LayerStage, layers: Sequence[str]) -> dict[str, Tensor]:
    """Trained weights by parameter name, whole on every replica."""
    names = {p: table_name(stage.model, name) for name, p in stage.model.named_parameters() if p.requires_grad}
    found = {}
    for layer in layers:
        stage.state.enter(layer, backward=False)
        own = [parameter for parameter in stage.model.layer(layer).parameters() if parameter in names]
        found |= {names[parameter]: parameter.detach().clone() for parameter in own}
        stage.state.leave(layer, backward=False)
    return found


def run_rank(plan: Plan, rank: int, replicas: dist.ProcessGroup | None, control: dist.ProcessGroup) -> RankResult:
    """One step of this rank's stages. Gradients are what plain gradient descent takes from weights, by steps so long
    that rounding of the weights hides nothing."""
    scenario = replace(plan.scenario, optimizer=Optimizer(name="sgd", learning_rate=STEP_LENGTH))
    plan, graph, data = replace(plan, scenario=scenario), build_graph(plan.scenario), step_data(plan, 0)
    program = lower(plan, graph, data.loads).ranks[rank]
    with patch("mmplan.runtime.train.MultimodalModel", _Perturbed):
        stages = build_stages(plan, graph, plan.row(program.stage), CPU, replicas=replicas)
    tie_stages(plan, graph, stages, group_maker(rank, "gloo", timedelta(seconds=30)))
    before: dict[str, Tensor] = {}
    for index, stage in stages.items():
        before |= trained_weights(stage, plan.stages[index].layers)
        stage.load(step_microbatches(plan, data, Place(0, program.replica, 0), stage.raw_modules, CPU))
    clock = WallClock(control, one_host=True)
    clock.start()
    record = run_step(program, stages, device=CPU, clock=clock)
    held_bytes = sum(stage.memory_bytes() for stage in stages.values())
    # plans count fp32 copies of 16-bit weights with AdamW alone; gradient descent has them too
    held_bytes -= sum(one._master_bytes for stage in stages.values() for one in stage.state.optimizers)
    layers = [graph.layer(layer) for index in stages for layer in plan.stages[index].layers]
    after = {
        name: w
        for index, stage in stages.items()
        for name, w in trained_weights(stage, plan.stages[index].layers).items()
    }
    return RankResult(
        gradients={name: (weight - after[name]) / STEP_LENGTH for name, weight in before.items()},
        losses={module: loss for stage in stages.values() for module, loss in stage.losses().items()},
        sent_bytes=record.activation_bytes + record.gradient_bytes,
        shared_bytes=record.reduce_bytes,
        state_bytes=held_bytes,
        program_bytes=sum(action.bytes for action in program.actions if action.kind == "SEND"),
        program_shared_bytes=sum(a.bytes for a in program.actions if a.kind not in ("SEND", "RECV")),
        planned_state_bytes=sum(planned_state_bytes(layer, scenario, plan.layout(program.stage)) for layer in layers),
    )


def _mean(x: Tensor, group: dist.ProcessGroup) -> None:
    """As DDP does, over replicas that have each a part of the sum."""
    all_reduce(x, group)
    x /= group.size()


def _but_for_one(stage: WeightedStage, microbatch: int) -> None:
    if microbatch != 1:
        WEIGHTS_OF(stage, microbatch)


def _stale(stage: LayerStage, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor is the first one of its name and size."""
    first = stage.__dict__.setdefault("first_of_size", {})
    kept = {name: first.setdefault((name, x.nbytes), x.clone()) for name, x in received.items()}
    return FORWARD_OF(stage, microbatch, kept)


FORWARD_OF, WEIGHTS_OF = LayerStage.forward, WeightedStage.backward_weight


def _faulty() -> dict[str, Any]:
    return {
        WRONG_SCALE: patch("mmplan.runtime.flat.all_reduce", _mean),
        NO_WEIGHTS: patch.object(WeightedStage, "backward_weight", _but_for_one),
        STALE: patch.object(LayerStage, "forward", _stale),
    }


def run_all_cases(rank: int, folder: str) -> None:
    """Body of one of the four processes; writes its results to `folder`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES, timeout=timedelta(seconds=30))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    world = dist.new_group(range(PROCESSES))
    results = {
        name: run_rank(plan, rank, pairs[rank // 2] if plan.dp == 2 else None, world) for name, plan in cases().items()
    }
    with patch("mmplan.runtime.ties.all_reduce"):
        results[LEFT_OUT] = run_rank(cases()[TABLE_ON_TWO], rank, pairs[rank // 2], world)
    for fault, patched in _faulty().items():
        plan = cases()[FAULTS[fault]]
        with patched:
            results[fault] = run_rank(plan, rank, pairs[rank // 2] if plan.dp == 2 else None, world)
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
