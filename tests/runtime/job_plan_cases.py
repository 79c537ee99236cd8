"""Plans of real models whose gradients are compared with one process."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from adapted_models import RANK, TARGETS, adapted
from expert_families import EXPERT_FAMILIES
from ghost_models import FAMILIES, saved_config
from gradient_cases import in_precisions
from llava_job import batches as llava_batches
from tiny_plans import hand_plan, tiny_scenario
from torch import Tensor, nn

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.planner.plan import Plan
from mmplan.planner.schedules.reschedule import refuse_unusable, with_family
from mmplan.runtime.first_gradients import STEP_LENGTH
from mmplan.runtime.ghost.importing import record_job
from mmplan.runtime.ghost.job import Job, count_labels, load_job
from mmplan.scenario.formats.hf_config import read_hf_config
from mmplan.scenario.scenario import Dtype, Optimizer, Scenario, Training
from mmplan.scenario.schedule_names import ScheduleName
from mmplan.scenario.technique import ContextParallel

MODELS = FAMILIES | EXPERT_FAMILIES | {"adapted": adapted}
STATISTICS = "running statistics in two stages, recomputed"
SPLIT = "own model as recorded, in two stages, split backwards"
PLAIN = Optimizer(name="sgd", learning_rate=STEP_LENGTH)


class HeadInGlue(nn.Module):
    """Gemma 3 as its authors do not run it: its own forward, not a unit of its own, reads the token table once more,
    and the scale of a norm in the first block of the tower."""

    def __init__(self) -> None:
        super().__init__()
        self.model = FAMILIES["gemma3"]()[0]().model

    def forward(self, labels: Tensor, **batch: Any) -> dict[str, Tensor]:
        states = self.model(**batch).last_hidden_state
        named = self.model.vision_tower.named_parameters()
        scale = next(p for name, p in named if name.endswith("layers.0.layer_norm1.weight"))
        logits = F.linear(states * scale.mean(), self.model.language_model.embed_tokens.weight)
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def job_of(family: str) -> Job:
    """The family's tiny model; batches of unlike content, those of LLaVA with no, one or two images."""

    if family in ("own", "normed"):
        return load_job(Path(__file__).parent / {"own": "own_model_job.py", "normed": "normed_job.py"}[family])

    def batches(size: int) -> Iterator[dict[str, Any]]:
        for index in count():
            torch.manual_seed(index)
            yield MODELS["gemma3" if family == "glue" else family]()[1]

    def model() -> nn.Module:
        return HeadInGlue() if family == "glue" else MODELS[family]()[0]()

    given = llava_batches if family == "llava" else batches
    return Job(file=Path(__file__), model=model, batches=given, weight=count_labels)


def scenario_of(family: str, folder: Path) -> Scenario:
    """What a user writes for the config of the model."""
    config = saved_config(job_of(family).model(), folder)
    return replace(tiny_scenario(), model=read_hf_config(config), global_batch=4, optimizer=PLAIN)


def recorded_scenario(family: str) -> Scenario:
    """What `mmplan import job` makes of the model."""
    with patch("mmplan.runtime.ghost.importing.MOST_SAMPLES", 3):
        model, _ = record_job(job_of(family))
    return replace(tiny_scenario(), model=model, global_batch=4, optimizer=PLAIN)


def cut(scenario: Scenario, *ends: str, dp: int = 1, samples: int = 1, **changes: Any) -> Plan:
    """Stages that end with these layers, and the rest; `changes`: of the plan, `recompute` of its stages."""
    layers = [layer.id for layer in build_graph(scenario).layers()]
    places = [0, *(layers.index(end) + 1 for end in ends), len(layers)]
    stages = [layers[first:end] for first, end in pairwise(places)]
    plan = hand_plan(scenario, stages, dp=dp, microbatch_size=samples)
    recompute = changes.pop("recompute", "none")
    return replace(plan, stages=tuple(replace(stage, recompute=recompute) for stage in plan.stages), **changes)


def chunks(plan: Plan) -> Plan:
    """Two stages on each rank."""
    return scheduled(plan, "interleaved")


def scheduled(plan: Plan, family: ScheduleName) -> Plan:
    costs = AnalyticCostModel(plan.scenario)
    return refuse_unusable(with_family(plan, family, build_graph(plan.scenario), costs))


def job_plans(folder: Path) -> dict[str, tuple[str, Plan]]:
    """Name -> family and plan."""
    llava, gemma, deep, mllama = (scenario_of(name, folder) for name in ("llava", "gemma3", "qwen3_vl", "mllama"))
    qwen, still = scenario_of("qwen2_5_vl", folder), with_training(llava, "llm", "frozen")
    audio, in_turn = scenario_of("qwen2_audio", folder), {"spread": ("vision", "projector")}
    frozen, zero_3 = with_training(llava, "vision", "frozen"), {"dp": 2, "sharding": "parameters"}
    low = with_training(llava, "llm", "lora", rank=RANK, targets=TARGETS)
    own, speech, sound, normed = (recorded_scenario(name) for name in ("own", "whisper", "qwen2_audio", "normed"))
    return {
        "LLaVA, ZeRO-3": ("llava", cut(llava, dp=4, sharding="parameters")),
        "LLaVA in two stages, ZeRO-2": ("llava", cut(llava, "llm.0", dp=2, sharding="gradients")),
        "LLaVA in two stages, ZeRO-3, recomputed": ("llava", cut(llava, "llm.0", recompute="full", **zero_3)),
        "Gemma 3, tied, ZeRO-3": ("gemma3", cut(gemma, dp=4, sharding="parameters")),
        "Gemma 3, tied over stages": ("gemma3", cut(gemma, "llm.0", dp=2)),
        "Gemma 3, tied over stages, ZeRO-3": ("gemma3", cut(gemma, "llm.0", **zero_3)),
        "a head in glue, ZeRO-3": ("glue", cut(gemma, "llm.0", **zero_3)),
        "Gemma 3, tied over four stages": ("gemma3", cut(gemma, "projector.0", "llm.embed", "llm.1")),
        "Gemma 3, tied over chunks": ("gemma3", chunks(cut(gemma, "llm.0", dp=2))),
        "two shared sets over chunks": ("glue", chunks(cut(gemma, "llm.0", dp=2))),
        "LLaVA in two stages, tensor parallel, attention recomputed": (
            "llava",
            cut(llava, "llm.0", tp=2, recompute="selective"),
        ),
        "LLaVA in two stages, sequence parallel": ("llava", cut(sequential(llava), "llm.0", tp=2)),
        "DeepStack, sequence parallel, recomputed, ZeRO-1": (
            "qwen3_vl",
            cut(sequential(deep), dp=2, tp=2, recompute="full", sharding="optimizer"),
        ),
        "cross-attention, sequence parallel": ("mllama", cut(sequential(mllama), dp=2, tp=2)),
        "Gemma 3, tied over stages, sequence parallel, split backwards": (
            "gemma3",
            scheduled(cut(sequential(gemma), "llm.0", tp=2), "zb-h1"),
        ),
        "LLaVA in two stages, tensor parallel, split backwards": (
            "llava",
            scheduled(cut(llava, "llm.0", tp=2), "zb-h1"),
        ),
        "LLaVA in two stages, rows, split backwards": ("llava", scheduled(cut(llava, "llm.0", cp=2), "zb-h1")),
        "images in turn, tensor parallel, split backwards": (
            "llava",
            scheduled(cut(llava, "llm.0", tp=2, **in_turn), "zb-h1"),
        ),
        "LLaVA, four tensor-parallel ranks": ("llava", cut(llava, tp=4)),
        "frozen tower, tensor parallel, ZeRO-3": ("llava", cut(frozen, tp=2, **zero_3)),
        "Gemma 3, tied over stages, tensor parallel": ("gemma3", cut(gemma, "llm.0", tp=2)),
        "Gemma 3, tied, tensor parallel, ZeRO-3": ("gemma3", cut(gemma, tp=2, **zero_3)),
        "DeepStack, tensor parallel, ZeRO-3": ("qwen3_vl", cut(deep, tp=2, **zero_3)),
        "cross-attention, tensor parallel, ZeRO-3, recomputed": (
            "mllama",
            cut(mllama, tp=2, recompute="full", **zero_3),
        ),
        "LLaVA in two stages, rows, ZeRO-3": ("llava", cut(llava, "llm.0", cp=2, sharding="parameters")),
        "frozen tower, rows on four ranks": ("llava", cut(frozen, cp=4)),
        "Gemma 3, tied over stages, rows": ("gemma3", cut(gemma, "llm.0", cp=2)),
        "a head in glue, rows, ZeRO-1": ("glue", cut(gemma, dp=2, cp=2, sharding="optimizer")),
        "Qwen2.5-VL, rows, recomputed": ("qwen2_5_vl", cut(qwen, dp=2, cp=2, recompute="full")),
        "DeepStack in two stages, rows": ("qwen3_vl", cut(deep, "llm.0", cp=2)),
        "frozen language model in two stages, rows": (
            "llava",
            cut(still, "llm.0", cp=2),
        ),
        "frozen language model in two stages, tensor parallel": (
            "llava",
            cut(still, "llm.0", tp=2),
        ),
        "LLaVA, rows for heads, recomputed": ("llava", cut(going(llava, "all-to-all"), dp=2, cp=2, recompute="full")),
        "Gemma 3 in two stages, rows for heads": ("gemma3", cut(going(gemma, "all-to-all"), "llm.0", cp=2)),
        "Gemma 3 in two stages, rows gathered": ("gemma3", cut(going(gemma, "gather"), "llm.0", cp=2)),
        "Qwen2.5-VL, rows gathered, recomputed": ("qwen2_5_vl", cut(going(qwen, "gather"), cp=4, recompute="full")),
        "Gemma 3, rows, tensor parallel": ("gemma3", cut(gemma, cp=2, tp=2)),
        "cross-attention, rows, tensor parallel, ZeRO-3, recomputed": (
            "mllama",
            cut(mllama, cp=2, tp=2, recompute="full", sharding="parameters"),
        ),
        "LLaVA in two stages, images in turn": ("llava", cut(llava, "llm.0", tp=2, **in_turn)),
        "cut inside the tower, images in turn, ZeRO-3, recomputed": (
            "llava",
            cut(llava, "vision.0", tp=2, sharding="parameters", recompute="full", **in_turn),
        ),
        "frozen tower, images in turn on four ranks": ("llava", cut(frozen, tp=4, **in_turn)),
        "Qwen2.5-VL, images in turn, rows, tensor parallel": ("qwen2_5_vl", cut(qwen, cp=2, tp=2, **in_turn)),
        "Qwen2-Audio, clips in turn, ZeRO-2": (
            "qwen2_audio",
            cut(audio, dp=2, tp=2, sharding="gradients", spread=("audio", "projector")),
        ),
        "own model as recorded, in two stages": ("own", cut(own, "blocks.0", dp=2, recompute="full")),
        SPLIT: ("own", scheduled(cut(own, "blocks.0", dp=2), "zb-1p")),
        "own model as recorded, in two stages, tensor parallel": ("own", cut(own, "blocks.0", tp=2)),
        "Qwen2-Audio as recorded, in two stages, tensor parallel, recomputed": (
            "qwen2_audio",
            cut(sound, "language_model.1", tp=2, recompute="full"),
        ),
        "own model as recorded, in four stages": ("own", cut(own, "bridge.0", "blocks.0", "blocks.2")),
        STATISTICS: ("normed", cut(normed, "blocks.0", dp=2, recompute="full")),
        "Whisper as recorded, tied over stages, ZeRO-3": ("whisper", cut(speech, "decoder.1", **zero_3)),
        "Qwen2-Audio as recorded, in two stages": ("qwen2_audio", cut(sound, "language_model.1", dp=2)),
        "a tower in bf16, in two stages, ZeRO-1": (
            "llava",
            cut(typed(llava, vision="bf16"), "llm.0", dp=2, sharding="optimizer"),
        ),
        "a tower in bf16, cut inside, ZeRO-3, recomputed": (
            "llava",
            cut(typed(llava, vision="bf16"), "vision.0", recompute="full", **zero_3),
        ),
        "an encoder as recorded in bf16": ("own", cut(typed(own, eye="bf16"), "blocks.0", dp=2)),
        "adapters in two stages": ("adapted", cut(low, "llm.0", dp=2)),
        "adapters, ZeRO-3": ("adapted", cut(low, dp=4, sharding="parameters")),
        "adapters, tensor parallel, ZeRO-2": ("adapted", cut(low, dp=2, tp=2, sharding="gradients")),
        "cross-attention, rows, ZeRO-3, recomputed": ("mllama", cut(mllama, cp=2, recompute="full", **zero_3)),
    }


def sequential(scenario: Scenario) -> Scenario:
    return replace(scenario, technique=replace(scenario.technique, sequence_parallel=True))


def going(scenario: Scenario, way: ContextParallel) -> Scenario:
    """Keys and values of rows on several ranks come together so."""
    return replace(scenario, technique=replace(scenario.technique, context_parallel=way))


def typed(scenario: Scenario, **precisions: Dtype) -> Scenario:
    """These modules in types of their own, the others in fp32."""
    names = (module.name for module in scenario.model.modules)
    return in_precisions(scenario, **{name: precisions.get(name, "fp32") for name in names})


def with_training(scenario: Scenario, module: str, mode: Any, **more: Any) -> Scenario:
    modules = tuple(
        replace(part, training=Training(mode=mode, **more)) if part.name == module else part
        for part in scenario.model.modules
    )
    return replace(scenario, model=replace(scenario.model, modules=modules))
