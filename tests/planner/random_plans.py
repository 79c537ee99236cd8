"""Random sound plans of real models with fewer layers: what exporters and importers have to carry there and back.

`random_plan(seed)` is a sound plan (`check_plan` finds nothing) for every seed. All degrees, ZeRO stages, schedules,
encoders on stages of their own, beside language layers or cut in the middle, spread or not, uneven cuts and unlike
recomputation of stages occur.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.degrees import divides, tp_degrees
from mmplan.cost_models.patches import patch_modules, read_by
from mmplan.planner.configuration import Configuration, divisors
from mmplan.planner.contract import contract
from mmplan.planner.cut_plan import plan_from_cut
from mmplan.planner.plan import Plan
from mmplan.planner.pricing import Prices
from mmplan.planner.problem import allowed_levels
from mmplan.planner.schedules.reschedule import with_family
from mmplan.scenario.cluster import Cluster
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Constraints, Model, ModelModule, Moe, Scenario, Training
from mmplan.scenario.schedule_names import ScheduleName
from mmplan.scenario.technique import SHARDINGS

SCENARIOS = Path(__file__).parents[2] / "scenarios"
MODELS = (
    "tiny",  # vision and audio
    "qwen2.5-vl-7b-sft",
    "qwen2-audio-7b",
    "qwen3-vl-30b-a3b",  # experts, DeepStack
    "kimi-k2.5-1t",  # experts, latent attention
    "llama-3.2-11b-vision",  # cross attention
    "llava-1.5-7b-sft",  # frozen vision
    "pixtral-12b",
    "internvl2.5-26b",
)
DEVICES_PER_NODE = 8
SCHEDULES: tuple[ScheduleName, ...] = (
    "1f1b",
    "1f1b",
    "gpipe",
    "interleaved",
    "interleaved",
    "interleaved",
    "zb-1p",
    "zb-v",
)


def random_plans(count: int, first: int = 0) -> list[Plan]:
    return [random_plan(seed) for seed in range(first, first + count)]


@cache
def random_plan(seed: int, models: tuple[str, ...] = MODELS) -> Plan:
    """A sound plan, the same for the same arguments; `models` are names of scenarios to draw from."""
    random = np.random.default_rng(seed)

    def choice(values: Sequence[object]) -> object:
        return values[int(random.integers(len(values)))]

    name = str(choice(models))
    scenario = _shrunk(name, int(random.integers(4, 13)), int(random.integers(2, 7)))
    if name != "tiny":
        scenario = _trained(scenario, str(choice(("as it is", "as it is", "frozen encoders", "all"))))
    width = int(choice([tp for tp in tp_degrees(scenario) if tp <= DEVICES_PER_NODE]))  # type: ignore[call-overload]
    cp = int(choice((1, 1, 1, 2)))  # type: ignore[call-overload]
    graph = build_graph(scenario)
    groups = contract(graph, ()).groups
    pp = min(int(choice((1, 2, 2, 3, 4, 4, 6, 8))), len(groups))  # type: ignore[call-overload]
    dp = int(choice((1, 2, 2, 4)))  # type: ignore[call-overload]
    ep, etp = _expert_degrees(scenario, random, width, width * cp * dp)
    microbatch_size = int(choice((1, 1, 2)))  # type: ignore[call-overload]
    microbatches = pp * int(random.integers(1, 4)) if random.random() < 0.7 else int(random.integers(1, 9))
    schedule = SCHEDULES[int(random.integers(len(SCHEDULES)))]
    modules = [module for module in scenario.model.modules if module.kind != "language_model"]
    spread = tuple(m.name for m in modules if not divides(m, width) or (width * cp > 1 and random.random() < 0.2))
    cut = np.random.default_rng((seed, 1)).random() < 0.4
    able = [name for name in patch_modules(scenario.model) if name in spread and cut]
    patches = tuple(name for name in able if read_by(scenario.model, name) in ("", *able))
    configuration = Configuration(
        tp=width,
        dp=dp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        sharding=SHARDINGS[int(random.integers(len(SHARDINGS)))] if dp * cp > 1 else "none",
        spread=spread,
        patches=patches,
        microbatch_size=microbatch_size,
        microbatches=microbatches,
        schedule="gpipe" if schedule == "gpipe" else "1f1b",
    )
    scenario = replace(
        scenario,
        global_batch=dp * microbatch_size * microbatches,
        cluster=_cluster(scenario.cluster, configuration.ranks),
        constraints=Constraints(memory_headroom=0.0),
        recipes=(),
    )
    levels = [str(choice(allowed_levels(scenario))) for _ in range(pp)]
    if random.random() < 0.6:
        levels = levels[:1] * pp
    costs = AnalyticCostModel(scenario)
    stages = _cut(scenario, groups, pp, random)
    plan = plan_from_cut(
        Prices(scenario, graph, costs),
        configuration,
        stages,
        bound_s=0.0,
        status="given",
        wall_s=0.0,
        levels=levels,  # type: ignore[arg-type]
    )
    if schedule == plan.schedule:
        return plan
    scheduled = with_family(plan, schedule, graph, costs)
    return scheduled.plan if scheduled.plan is not None and scheduled.fits else plan


@cache
def _shrunk(name: str, language_layers: int, encoder_layers: int) -> Scenario:
    """A scenario of the repository with fewer layers, of which some cross attend or have experts still."""
    scenario = load_scenario(SCENARIOS / f"{name}.yaml")
    if name == "tiny":
        return scenario
    model, kept = scenario.model, {"language_model": language_layers}
    depths = {m.name: kept.get(m.kind, encoder_layers) for m in model.modules}
    edges = tuple(
        replace(edge, producer_layer=None if edge.producer_layer is None else position % (depths[edge.producer] - 1))
        for position, edge in enumerate(model.edges)
    )
    modules = tuple(_shallow(module, depths[module.name]) for module in model.modules)
    return replace(scenario, model=Model(name=model.name, modules=modules, edges=edges))


def _shallow(module: ModelModule, layers: int) -> ModelModule:
    shape = module.transformer
    if shape is None:
        return module
    return replace(
        module,
        transformer=replace(
            shape,
            layers=layers,
            global_layers=tuple(index for index in shape.global_layers if index < layers),
            cross_layers=tuple(index for index in shape.cross_layers if index < layers),
            moe=_few_experts(shape.moe),
        ),
    )


def _few_experts(moe: Moe | None) -> Moe | None:
    return None if moe is None else replace(moe, experts=16, topk=min(moe.topk, 4))


def _trained(scenario: Scenario, how: str) -> Scenario:
    """Everything trained, or the encoders frozen; else as the file says."""
    if how == "as it is":
        return scenario

    def training(module: ModelModule) -> Training:
        encoder = module.kind.endswith("encoder")
        return Training(mode="frozen") if how == "frozen encoders" and encoder else Training()

    modules = tuple(replace(module, training=training(module)) for module in scenario.model.modules)
    return replace(scenario, model=replace(scenario.model, modules=modules))


def _expert_degrees(scenario: Scenario, random: np.random.Generator, tp: int, ranks: int) -> tuple[int, int]:
    """ep and etp whose product divides the ranks of a stage."""
    counts = [m.transformer.moe.experts for m in scenario.model.modules if m.transformer and m.transformer.moe]
    if not counts:
        return 1, 1
    possible = [(ep, etp) for ep in divisors(counts[0]) for etp in {1, tp} if ep > 1 and ranks % (ep * etp) == 0]
    return (1, 1) if not possible or random.random() < 0.2 else possible[int(random.integers(len(possible)))]


def _cluster(cluster: Cluster, ranks: int) -> Cluster:
    """Full nodes of H100s that hold the ranks, or a single node that they fill."""
    pool = cluster.pools[0]
    per_node = DEVICES_PER_NODE if ranks % DEVICES_PER_NODE == 0 or ranks > DEVICES_PER_NODE else ranks
    device = replace(pool.device, memory_bytes=2**42)  # the plans are for their shapes: everything fits
    return replace(
        cluster, pools=(replace(pool, device=device, devices_per_node=per_node, nodes=-(-ranks // per_node)),)
    )


def _cut(
    scenario: Scenario, groups: Sequence[Sequence[str]], pp: int, random: np.random.Generator
) -> list[tuple[str, ...]]:
    """Contiguous in topological order: anywhere, behind all encoders, or behind them and some language layers."""
    languages = {module.name for module in scenario.model.modules if module.kind == "language_model"}
    behind = max((i + 1 for i, group in enumerate(groups) if group[0].split(".")[0] not in languages), default=0)
    where = random.random()
    places = np.arange(1, len(groups))
    if where < 0.7 and len(groups) - 1 - behind >= pp:
        places = np.arange(behind + 1, len(groups))
    chosen = sorted(random.choice(places, size=pp - 1, replace=False).tolist())
    if 0.4 < where < 0.55 and pp > 1 and behind and behind not in chosen:
        chosen = sorted([behind, *chosen[1:]])  # encoders on a stage of their own
    ends = [0, *chosen, len(groups)]
    return [tuple(layer for group in groups[first:last] for layer in group) for first, last in pairwise(ends)]
