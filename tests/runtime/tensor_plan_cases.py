"""Plans whose stages split their layers over several ranks."""

from dataclasses import replace

from case_processes import chosen
from gradient_cases import TIED_STAGES, cases, in_precisions
from meshed_plan_cases import meshed_cases
from padded_plan_cases import padded_cases
from row_plan_cases import DEEP, ONE_STAGE, TALKER, attention_again, row_cases
from sequence_plan_cases import sequence_cases
from tiny_plans import AUDIO, TWO_STAGES, changed_module, changed_projector, hand_plan, pooled_sound

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.planner.plan import Plan
from mmplan.planner.schedules.reschedule import refuse_unusable, with_family
from mmplan.scenario.scenario import Dtype, Scenario

TP = 2
VISION_AND_AUDIO = ("vision", "projector", "audio", "audio_projector")
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
    "patches pooled by 4, replicas that share weights",
    "patches placed among rows of text in another stage",
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
    "placed among rows on 2 ranks from 2 replicas",
    "patches through projectors, slices to tp 2",
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
    behind = ("vision", "projector", "audio", "audio_projector")
    pooled = changed_projector(hand_plan(tiny, TWO_STAGES, microbatch_size=2), "audio_projector", pool=4)
    return {
        "patches through projectors that join 4 rows": replace(
            halves, spread=encoders, patches=("vision", "projector")
        ),
        "patches pooled by 4 in front of rows of text": replace(pooled, cp=2, spread=behind, patches=behind),
        "sound pooled by 3 where its frames lie, recomputed": replace(
            pooled_sound(hand_plan(tiny, ONE_STAGE, microbatch_size=2), 3),
            cp=2,
            spread=("audio",),
            patches=("audio",),
            stages=recomputed,
        ),
        "patches placed among rows of text in another stage": replace(
            changed_projector(hand_plan(tiny, TIED_STAGES, microbatch_size=2), "audio_projector", pool=4),
            cp=2,
            spread=behind,
            patches=behind,
        ),
        "patches pooled by 4, replicas that share weights": replace(
            changed_projector(hand_plan(tiny, ONE_STAGE, dp=2, microbatch_size=3), "projector", pool=4),
            tp=TP,
            spread=encoders,
            patches=behind,
            sharding="parameters",
        ),
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
