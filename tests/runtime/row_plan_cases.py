"""Plans whose language models have their rows on several ranks, in each way that keys and values come together."""

from dataclasses import replace

from tiny_plans import AUDIO, TWO_STAGES, VISION, changed_module, hand_plan

from mmplan.planner.plan import Plan
from mmplan.scenario.scenario import Scenario
from mmplan.scenario.technique import ContextParallel

DEEP = ((*VISION, "deep.0", *AUDIO, "llm.embed", "llm.0-1"), ("llm.2-5", "llm.head", "llm.loss"))
TALKER = (
    (*VISION, *AUDIO, "llm.embed", "llm.0-5"),
    ("llm.head", "llm.loss", "talker.embed", "talker.0-1", "talker.head", "talker.loss"),
)
ONE_STAGE = (tuple(layer for stage in TWO_STAGES for layer in stage),)


def row_cases(models: dict[str, Scenario]) -> dict[str, Plan]:
    """Name -> plan."""
    return {**_context_cases(models), **_gathered_cases(models), **_exchanged_cases(models)}


def _context_cases(models: dict[str, Scenario]) -> dict[str, Plan]:
    """Rows of the language model on two ranks or four, whose keys and values pass around."""
    tiny, encoders = models["1f1b"], ("vision", "projector", "audio", "audio_projector")
    two = hand_plan(tiny, TWO_STAGES, microbatch_size=2)
    recomputed = replace(two, stages=tuple(replace(stage, recompute="full") for stage in two.stages))
    experts = models["experts, latent attention and DeepStack"]
    layers = tuple(name for stage in DEEP for name in stage)
    return {
        "rows on two ranks": replace(two, cp=2),
        "rows on two ranks that share weights, a table on two stages": replace(
            hand_plan(models["a table on two stages"], TWO_STAGES), cp=2, sharding="parameters"
        ),
        "rows on two ranks, recomputed, images dealt out": replace(recomputed, cp=2, spread=encoders),
        "rows and columns": replace(hand_plan(models["cross-attention in two stages"], ONE_STAGE), cp=2, tp=2),
        "rows of a talker": replace(hand_plan(models["talker"], TALKER, microbatch_size=2), cp=2),
        "rows and columns of a talker": replace(hand_plan(models["talker"], ((*TALKER[0], *TALKER[1]),)), cp=2, tp=2),
        "rows on four ranks, sliding windows and adapters": attention_again(replace(_sliding(models, ONE_STAGE), cp=4)),
        "rows, replicas and experts": replace(hand_plan(experts, (layers,), dp=2), cp=2, ep=4, sharding="parameters"),
    }


def attention_again(plan: Plan) -> Plan:
    """Attention alone is computed once more in the backward."""
    return replace(plan, stages=tuple(replace(stage, recompute="selective") for stage in plan.stages))


def _gathered_cases(models: dict[str, Scenario]) -> dict[str, Plan]:
    """The same, keys and values gathered."""
    plans = {
        **_context_cases(models),
        "patches over rows of text": replace(
            hand_plan(models["1f1b"], ONE_STAGE), cp=4, spread=("vision",), patches=("vision",)
        ),
    }
    return {f"gathered, {name}": _going(plan, "gather") for name, plan in plans.items()}


def _sliding(models: dict[str, Scenario], stages: tuple[tuple[str, ...], ...]) -> Plan:
    """A LoRA language model whose rows see few others."""
    return changed_module(hand_plan(models["LoRA language model"], stages), "llm", window_tokens=24, sliding=True)


def _exchanged_cases(models: dict[str, Scenario]) -> dict[str, Plan]:
    """Rows of the language model on two ranks, which exchange them for heads."""
    tiny, encoders = models["1f1b"], ("vision", "projector", "audio", "audio_projector")
    two = hand_plan(tiny, TWO_STAGES, microbatch_size=2)
    full = tuple(replace(stage, recompute="full") for stage in two.stages)
    experts = models["experts, latent attention and DeepStack"]
    layers = tuple(name for stage in DEEP for name in stage)
    one = hand_plan(tiny, ONE_STAGE, microbatch_size=2)
    again = tuple(replace(stage, recompute="full") for stage in one.stages)
    plans = {
        "alone": replace(hand_plan(tiny, ONE_STAGE, dp=2), cp=2),
        "in two stages, recomputed": replace(two, cp=2, stages=full),
        "sliding windows and adapters": replace(_sliding(models, TWO_STAGES), cp=2),
        "columns": attention_again(replace(changed_module(one, "llm", heads=8, kv_heads=4, head_dim=16), cp=2, tp=2)),
        "columns of cross-attention, recomputed": replace(
            changed_module(hand_plan(models["cross-attention in two stages"], ONE_STAGE), "llm", kv_heads=4),
            cp=2,
            tp=2,
            stages=again,
        ),
        "a talker": replace(hand_plan(models["talker"], TALKER, microbatch_size=2), cp=2),
        "patches over rows of text": replace(two, cp=2, spread=encoders, patches=("vision",)),
        "replicas and experts": replace(hand_plan(experts, (layers,), dp=2), cp=2, ep=4, sharding="parameters"),
    }
    return {f"rows for heads, {name}": _going(plan, "all-to-all") for name, plan in plans.items()}


def _going(plan: Plan, way: ContextParallel) -> Plan:
    technique = replace(plan.scenario.technique, context_parallel=way)
    return replace(plan, scenario=replace(plan.scenario, technique=technique))
