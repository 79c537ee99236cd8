"""Plans of real models whose encoders have ranks of their own beside a language model with other degrees, on four
ranks."""

from dataclasses import replace
from pathlib import Path

from job_plan_cases import cut, going, scenario_of, sequential, with_training
from meshed_plan_cases import SIGHT, crossing_by, own

from mmplan.planner.plan import Plan


def meshed_jobs(folder: Path) -> dict[str, tuple[str, Plan]]:
    """Name -> family and plan; ranks 0 and up are the language model's."""
    names = ("llava", "mllama", "qwen2_5_vl", "qwen2_audio", "gemma3", "qwen3_vl", "qwen3_vl_moe")
    llava, mllama, qwen, audio, gemma, deep, experts = (scenario_of(name, folder) for name in names)
    clips, more = ("audio", "projector"), ("deepstack0", "deepstack1")
    routed = cut(experts, "deepstack1.0", dp=2, ep=2, sharding="parameters")
    frozen = with_training(llava, "vision", "frozen")
    apart, both = own(*SIGHT, dp=2, first=2), cut(llava, "projector.0", dp=2)
    wide, crossed = cut(llava, "projector.0", samples=2), cut(mllama, "projector.0", samples=2)
    rows = cut(sequential(llava), "projector.0", samples=2)
    chain = cut(llava, "projector.0", "llm.0", samples=2, recompute="full", sharding="parameters")
    three = replace(llava, global_batch=6)
    plans = {
        "LLaVA, tower on ranks of its own, ZeRO-3": replace(both, sharding="parameters", meshes=(apart,)),
        "LLaVA, tower on 2 replicas, language model on tp 2": replace(wide, tp=2, meshes=(apart,)),
        "LLaVA, tower on tp 2, language model on 2 replicas": replace(both, meshes=(own(*SIGHT, tp=2, first=2),)),
        "LLaVA, tower on 2 replicas, a chain of two stages, ZeRO-3, recomputed": replace(chain, meshes=(apart,)),
        "LLaVA, tower cut in two, language model on 2 replicas": replace(
            cut(llava, "vision.0", "projector.0", dp=2), meshes=(own(*SIGHT, first=2),)
        ),
        "LLaVA, 3 replicas of the tower, ZeRO-2": replace(
            cut(three, "projector.0", samples=3, sharding="gradients"), meshes=(own(*SIGHT, dp=3, first=1),)
        ),
        "LLaVA, a frozen tower beside 3 replicas": replace(
            cut(replace(frozen, global_batch=6), "projector.0", dp=3), meshes=(own(*SIGHT, first=3),)
        ),
        "LLaVA, a tower, a rank idle": replace(cut(llava, "projector.0"), tp=2, meshes=(own(*SIGHT, first=3),)),
        "LLaVA, slices to tp 2": crossing_by("slices", replace(wide, tp=2, meshes=(apart,))),
        "LLaVA, broadcasts to tp 2": crossing_by("broadcast", replace(wide, tp=2, meshes=(apart,))),
        "LLaVA, slices from tp 2": crossing_by("slices", replace(both, meshes=(own(*SIGHT, tp=2, first=2),))),
        "LLaVA, tower on 2 replicas, rows": crossing_by("placed", replace(wide, cp=2, meshes=(apart,))),
        "LLaVA, tower on 2 replicas, rows over tp": replace(rows, tp=2, meshes=(apart,)),
    }
    found = {name: ("llava", plan) for name, plan in plans.items()}
    return found | {
        "cross-attention, slices from tp 2 to rows": (
            "mllama",
            crossing_by("slices", replace(crossed, cp=2, meshes=(own(*SIGHT, tp=2, first=2),))),
        ),
        "Qwen2.5-VL, tower on 2 replicas, rows gathered": (
            "qwen2_5_vl",
            replace(cut(going(qwen, "gather"), "projector.0", samples=2), cp=2, meshes=(apart,)),
        ),
        "Qwen2-Audio, clips on tp 2, broadcasts": (
            "qwen2_audio",
            crossing_by("broadcast", replace(cut(audio, "projector.0", dp=2), meshes=(own(*clips, tp=2, first=2),))),
        ),
        "Gemma 3, tied over stages, a tower of its own": (
            "gemma3",
            replace(cut(gemma, "vision.1", "projector.0", "llm.0"), meshes=(own(*SIGHT, first=2),)),
        ),
        "DeepStack, tower on 2 replicas, slices to tp 2": (
            "qwen3_vl",
            crossing_by(
                "slices",
                replace(cut(deep, "deepstack1.0", samples=2), tp=2, meshes=(own(*SIGHT, *more, dp=2, first=2),)),
            ),
        ),
        "a tower on tp 2 beside experts over 2 replicas, ZeRO-3": (
            "qwen3_vl_moe",
            replace(routed, meshes=(own(*SIGHT, *more, tp=2, first=2),)),
        ),
    }


def uneven_jobs(folder: Path) -> dict[str, tuple[str, Plan]]:
    """On five ranks: three replicas of one mesh beside two of the other; a tower beside rows and columns on four."""
    llava = replace(scenario_of("llava", folder), global_batch=12)
    both = cut(llava, "projector.0", dp=2, samples=3, sharding="parameters")
    three = cut(llava, "projector.0", dp=3, samples=2, recompute="full")
    four = replace(cut(llava, "projector.0"), tp=2, cp=2, meshes=(own(*SIGHT, first=4),))
    plans = {
        "LLaVA, 3 replicas of the tower beside 2, ZeRO-3": replace(both, meshes=(own(*SIGHT, dp=3, first=2),)),
        "LLaVA, 2 replicas of the tower beside 3, recomputed": replace(three, meshes=(own(*SIGHT, dp=2, first=3),)),
        "LLaVA, slices to rows on 2 x tp 2": crossing_by("slices", four),
    }
    return {name: ("llava", plan) for name, plan in plans.items()}
