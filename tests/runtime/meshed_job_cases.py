"""Plans of real models whose encoders have ranks of their own beside a language model with other degrees, on four
ranks."""

from dataclasses import replace
from pathlib import Path

from job_plan_cases import cut, scenario_of, with_training
from meshed_plan_cases import SIGHT, crossing_by, own

from mmplan.planner.plan import Plan


def meshed_jobs(folder: Path) -> dict[str, tuple[str, Plan]]:
    """Name -> family and plan; ranks 0 and up are the language model's."""
    llava, mllama = scenario_of("llava", folder), scenario_of("mllama", folder)
    frozen = with_training(llava, "vision", "frozen")
    apart, both = own(*SIGHT, dp=2, first=2), cut(llava, "projector.0", dp=2)
    wide, crossed = cut(llava, "projector.0", samples=2), cut(mllama, "projector.0", samples=2)
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
        "LLaVA, tower on 2 replicas, rows": replace(wide, cp=2, meshes=(apart,)),
    }
    found = {name: ("llava", plan) for name, plan in plans.items()}
    return found | {
        "cross-attention, slices from tp 2 to rows": (
            "mllama",
            crossing_by("slices", replace(crossed, cp=2, meshes=(own(*SIGHT, tp=2, first=2),))),
        ),
    }
