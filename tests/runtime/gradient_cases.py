"""Pipelines whose gradients are compared with one process."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from tiny_plans import AUDIO, FOUR_STAGES, TWO_STAGES, VISION, hand_plan, tiny_scenario

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.layout import RecomputeLevel
from mmplan.planner.plan import Plan
from mmplan.planner.schedules.reschedule import optimized, refuse_unusable, with_family
from mmplan.scenario.attention_forms import Mla
from mmplan.scenario.scenario import (
    Distribution,
    Dtype,
    Model,
    ModelEdge,
    ModelModule,
    Moe,
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


@cache
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
