"""Plans whose encoders have ranks of their own beside a language model with other degrees, on four ranks together."""

from dataclasses import replace

from tiny_plans import AUDIO, VISION, hand_plan

from mmplan.cost_models.build import build_graph
from mmplan.planner.border import TensorWay, Way
from mmplan.planner.mesh import Mesh
from mmplan.planner.plan import Plan, module_of
from mmplan.scenario.scenario import Moe, Scenario

LLM = ("llm.embed", "llm.0-5", "llm.head", "llm.loss")
HALVES = (("llm.embed", "llm.0-2"), ("llm.3-5", "llm.head", "llm.loss"))
DEEP = (("vision.embed", "vision.0-1"), ("vision.2-3", "projector.0"))
SIGHT, SOUND = ("vision", "projector"), ("audio", "audio_projector")


def meshed_cases(models: dict[str, Scenario]) -> dict[str, Plan]:
    """Name -> plan; ranks 0 and up are the language model's."""
    tiny, crossed = models["1f1b"], models["cross-attention in two stages"]
    encoders = ((*VISION, *AUDIO), LLM)
    wide = hand_plan(tiny, encoders, microbatch_size=2)
    both = hand_plan(tiny, encoders, dp=2)
    two = hand_plan(tiny, (*DEEP, (*AUDIO, *LLM)), dp=2)
    stages = tuple(replace(stage, recompute="full") for stage in two.stages)
    dealt = replace(wide, tp=2, meshes=(own(*SIGHT, *SOUND, dp=2, first=2),))
    return {
        "encoders on 2 replicas, language model on tp 2": dealt,
        "encoders on tp 2, language model on 2 replicas": replace(both, meshes=(own(*SIGHT, *SOUND, tp=2, first=2),)),
        "cross-attention, 2 replicas of encoders": replace(
            hand_plan(crossed, encoders, microbatch_size=2), tp=2, meshes=(own(*SIGHT, *SOUND, dp=2, first=2),)
        ),
        "vision on 2 replicas that share weights, a chain of two stages": replace(
            hand_plan(tiny, (VISION, (*AUDIO, *HALVES[0]), HALVES[1]), microbatch_size=2),
            sharding="parameters",
            meshes=(own(*SIGHT, dp=2, first=2),),
        ),
        "two meshes": replace(
            hand_plan(replace(tiny, global_batch=8), (VISION, AUDIO, LLM), microbatch_size=4),
            meshes=(own(*SIGHT, dp=2, first=1), own(*SOUND, first=3)),
        ),
        "vision in two stages, recomputed": replace(two, stages=stages, meshes=(own(*SIGHT, first=2),)),
        "a frozen encoder on tp 2": replace(
            hand_plan(models["frozen vision encoder"], (VISION, (*AUDIO, *LLM)), dp=2),
            sharding="optimizer",
            meshes=(own(*SIGHT, tp=2, first=2),),
        ),
        "a rank between two meshes idle": replace(
            hand_plan(tiny, encoders), tp=2, meshes=(own(*SIGHT, *SOUND, first=3),)
        ),
        **_sliced_cases(models),
        **_patch_cases(models),
        **_ways_cases(models),
    }


def uneven_cases(tiny: Scenario) -> dict[str, Plan]:
    """On five ranks: three replicas of encoders beside two of the language model, where the second of three has
    samples of both; and one encoder beside rows and columns on four ranks."""
    encoders, wide = ((*VISION, *AUDIO), LLM), replace(tiny, global_batch=12)
    apart, both = own(*SIGHT, *SOUND, dp=3, first=2), hand_plan(wide, encoders, dp=2, microbatch_size=3)
    stages = tuple(replace(stage, recompute="full") for stage in both.stages)
    over_four = replace(hand_plan(tiny, encoders), tp=2, cp=2, meshes=(own(*SIGHT, *SOUND, first=4),))
    return {
        "3 replicas of encoders beside 2": replace(both, meshes=(apart,), sharding="parameters"),
        "2 replicas of encoders beside 3, recomputed": replace(
            hand_plan(wide, encoders, dp=3, microbatch_size=2),
            stages=stages,
            meshes=(own(*SIGHT, *SOUND, dp=2, first=3),),
        ),
        "slices to rows on 2 x tp 2": crossing_by("slices", over_four),
        "placed among rows on 2 x tp 2": crossing_by("placed", over_four),
        "broadcasts to rows on 2 x tp 2": crossing_by("broadcast", over_four),
    }


def _ways_cases(models: dict[str, Scenario]) -> dict[str, Plan]:
    """Tensors that cross in slices which readers gather over tp, or to the first rank of a group, which broadcasts."""
    tiny, crossed = models["1f1b"], models["cross-attention in two stages"]
    experts = models["experts, latent attention and DeepStack"]
    encoders, both = ((*VISION, *AUDIO), LLM), (*SIGHT, *SOUND)
    wide, apart = hand_plan(tiny, encoders, microbatch_size=2), (own(*both, dp=2, first=2),)
    deep = hand_plan(experts, ((*VISION, "deep.0", *AUDIO), LLM), dp=2)
    patched = replace(own(*both, first=2), cp=2, patches=("vision", "audio"))
    rows = replace(hand_plan(crossed, encoders, microbatch_size=2), cp=2, meshes=(own(*both, tp=2, first=2),))
    through = replace(patched, patches=both)
    stacked = hand_plan(experts, ((*VISION, "deep.0", *AUDIO), LLM), microbatch_size=2)
    plans: dict[str, tuple[Plan, Way]] = {
        "placed among rows on 2 ranks from 2 replicas": (replace(wide, cp=2, meshes=apart), "placed"),
        "placed among rows on 2 ranks from patches through projectors, DeepStack": (
            replace(
                stacked,
                cp=2,
                meshes=(replace(through, modules=(*both, "deep"), patches=("vision", "projector", "deep")),),
            ),
            "placed",
        ),
        "patches through projectors, slices to tp 2": (replace(wide, tp=2, meshes=(through,)), "slices"),
        "slices to tp 2 from 2 replicas": (replace(wide, tp=2, meshes=apart), "slices"),
        "broadcasts to tp 2 from 2 replicas": (replace(wide, tp=2, meshes=apart), "broadcast"),
        "slices from tp 2 to 2 replicas": (replace(hand_plan(tiny, encoders, dp=2), meshes=rows.meshes), "slices"),
        "hidden states of DeepStack from tp 2, gradients broadcast": (
            replace(deep, sharding="gradients", meshes=(own(*SIGHT, "deep", *SOUND, tp=2, first=2),)),
            "broadcast",
        ),
        "slices from tp 2 to rows on 2 ranks, cross-attention": (rows, "slices"),
        "slices from patches on 2 ranks to tp 2": (replace(wide, tp=2, meshes=(patched,)), "slices"),
        "broadcasts from patches on 2 ranks to tp 2": (replace(wide, tp=2, meshes=(patched,)), "broadcast"),
    }
    return {name: crossing_by(way, plan) for name, (plan, way) in plans.items()}


def crossing_by(way: Way, plan: Plan) -> Plan:
    """The plan with all tensors between unlike meshes on one way."""
    mesh_of = {name: mesh for mesh in plan.meshes for name in mesh.modules}
    edges = [(edge.producer, edge.consumer) for edge in build_graph(plan.scenario).edges()]
    ends = dict.fromkeys((producer, module_of(consumer)) for producer, consumer in edges)
    across = [ends_ for ends_ in ends if mesh_of.get(module_of(ends_[0])) != mesh_of.get(ends_[1])]
    return replace(plan, ways=tuple(TensorWay(producer=a, reader=b, way=way) for a, b in across))


def _sliced_cases(models: dict[str, Scenario]) -> dict[str, Plan]:
    """Rows of the language model on cp ranks, which get slices of what encoders with other degrees make."""
    tiny, crossed = models["1f1b"], models["cross-attention in two stages"]
    experts = models["experts, latent attention and DeepStack"]
    encoders = ((*VISION, *AUDIO), LLM)
    wide = hand_plan(tiny, encoders, microbatch_size=2)
    routed = hand_plan(experts, ((*VISION, "deep.0", *AUDIO), LLM), dp=2)
    stages = tuple(replace(stage, recompute="full") for stage in wide.stages)
    return {
        "2 replicas of encoders, rows on 2 ranks": replace(
            wide, cp=2, stages=stages, meshes=(own(*SIGHT, *SOUND, dp=2, first=2),)
        ),
        "encoders on tp 2, rows on 2 ranks, cross-attention": replace(
            hand_plan(crossed, encoders, microbatch_size=2), cp=2, meshes=(own(*SIGHT, *SOUND, tp=2, first=2),)
        ),
        "vision in two stages, rows and clips on 2 ranks": replace(
            hand_plan(tiny, (*DEEP, (*AUDIO, *LLM)), microbatch_size=2),
            cp=2,
            spread=SOUND,
            sharding="optimizer",
            meshes=(own(*SIGHT, first=2),),
        ),
        "encoders on tp 2, experts over 2 replicas": replace(
            routed, ep=2, sharding="gradients", meshes=(own(*SIGHT, "deep", *SOUND, tp=2, first=2),)
        ),
        "encoders on 2 replicas, rows and experts on 2 ranks": replace(
            hand_plan(experts, ((*VISION, "deep.0", *AUDIO), LLM), microbatch_size=2),
            cp=2,
            ep=2,
            meshes=(own(*SIGHT, "deep", *SOUND, dp=2, first=2),),
        ),
        "experts of an encoder over its 2 replicas, language model on tp 2": replace(
            hand_plan(_expert_vision(tiny), encoders, microbatch_size=2),
            tp=2,
            sharding="optimizer",
            meshes=(replace(own(*SIGHT, *SOUND, dp=2, first=2), ep=2),),
        ),
        "experts of an encoder over tp 2, language model on 2 replicas": replace(
            hand_plan(_expert_vision(tiny), encoders, dp=2),
            meshes=(replace(own(*SIGHT, *SOUND, tp=2, first=2), ep=2),),
        ),
    }


def _patch_cases(models: dict[str, Scenario]) -> dict[str, Plan]:
    """Encoders whole on each of two cp ranks of their own, with some rows of all images or some of the images."""
    tiny, crossed = models["1f1b"], models["cross-attention in two stages"]
    experts = models["experts, latent attention and DeepStack"]
    encoders, both = ((*VISION, *AUDIO), LLM), (*SIGHT, *SOUND)
    wide = hand_plan(tiny, encoders, microbatch_size=2)
    stages = tuple(replace(stage, recompute="full") for stage in wide.stages)
    patched = replace(own(*both, first=2), cp=2, patches=("vision", "audio"))
    return {
        "patches on 2 ranks, language model on tp 2": replace(wide, tp=2, sharding="parameters", meshes=(patched,)),
        "patches on 2 ranks, language model on 2 replicas": replace(
            hand_plan(tiny, encoders, dp=2), stages=stages, meshes=(patched,)
        ),
        "patches on 2 ranks, rows on 2 ranks, DeepStack": replace(
            hand_plan(experts, ((*VISION, "deep.0", *AUDIO), LLM), microbatch_size=2),
            cp=2,
            meshes=(replace(patched, modules=(*both, "deep"), patches=("vision",)),),
        ),
        "images in turn on 2 ranks, cross-attention, 2 replicas": replace(
            hand_plan(crossed, encoders, dp=2), sharding="optimizer", meshes=(replace(patched, patches=()),)
        ),
        "patches on 2 ranks, their projector elsewhere": replace(
            hand_plan(tiny, (("vision.embed", "vision.0-3"), ("projector.0", *AUDIO, *LLM)), microbatch_size=2),
            cp=2,
            meshes=(replace(patched, modules=("vision",), patches=("vision",)),),
        ),
    }


def _expert_vision(scenario: Scenario) -> Scenario:
    """Four experts in the blocks of the vision encoder."""
    modules = tuple(
        replace(m, transformer=replace(m.transformer, moe=Moe(experts=4, topk=2, expert_ffn=48)))
        if m.name == "vision" and m.transformer
        else m
        for m in scenario.model.modules
    )
    return replace(scenario, model=replace(scenario.model, modules=modules))


def own(*modules: str, tp: int = 1, dp: int = 1, first: int) -> Mesh:
    return Mesh(modules=modules, tp=tp, dp=dp, first_rank=first)
