"""Lower bounds against the best cut of their configuration, on random variations of the shipped scenarios.

    python benchmarks/bounds.py [--checks 3000] [--seed 0]      # rewrites benchmarks/bounds.csv
    python benchmarks/bounds.py --kind patches [--checks 300]   # one kind of variation, only printed

A variation freezes or trains modules, slows or hastens links and devices, leaves less memory, puts unlike pools beside
each other, forces recomputation, sharding, chunks, host memory, compression, cp, images cut along patches, encoders
that run several microbatches at once, ties heads to token tables, or three of these; `--kind prices` gives two unlike
pools prices. Of each some configurations are bounded, at first sight and closely, and cut exactly; a bound is wrong if
it is above the closed form of that cut by more than 1e-7 of it, which is what rounding to nanoseconds can do. Of every
fourth variation a whole search is made: its plan has to pass `mmplan check`, and no configuration cut here may be
quicker (with prices: cost less) than its proven bound. One row per kind of variation.
"""

import argparse
import math
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import get_args

import numpy as np
from measured import MACHINE, ROOT, write_rows

from mmplan.errors import InfeasibleError, MmplanError, NoPlanFoundError
from mmplan.planner.bounds import lower_bounds
from mmplan.planner.check import check_plan
from mmplan.planner.chunk_solver import solve_chunks
from mmplan.planner.configuration import Configuration
from mmplan.planner.cut_plan import cut_stages
from mmplan.planner.objective import STEP_TIME, Objective
from mmplan.planner.problem import build_problem
from mmplan.planner.search import optimize
from mmplan.planner.space import Space, build_space, stage_layers
from mmplan.planner.stage_solver import solve_cut
from mmplan.scenario.cluster import Cluster, Pool
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import ModelModule, Scenario, Training
from mmplan.scenario.technique import OFFLOADS, SHARDINGS, ContextParallel

SCENARIOS = ("tiny", "llava-1.5-7b-sft", "llama-3.2-11b-vision", "llava-1.5-7b-pretrain", "qwen2-vl-7b")
SCENARIOS += ("qwen2-audio-7b", "whisper-llama3-8b", "qwen3-vl-30b-a3b", "vitl16-llama3-8b", "pixtral-12b")
SCENARIOS += ("qwen2.5-omni-7b", "llava-ov-7b")
KINDS = ("any", "recompute", "sharding", "chunks", "unlike pools", "host memory", "compression", "patches", "cp")
KINDS += ("together", "tied tables", "mixed")
ASKED = ("prices",)  # kinds by their name alone
MOST_STAGES, EACH = 8, 20
SEARCH_S = 20.0
ROUNDING = 1e-7


@dataclass(slots=True)
class Tally:
    """`above_*`: by how much, relative to the closed form, the highest bound exceeds it."""

    variations: int = 0
    checks: int = 0
    wrong: int = 0
    searches: int = 0
    refused: int = 0
    above_first: list[float] = field(default_factory=list)
    above_close: list[float] = field(default_factory=list)


def varied(draw: random.Random, kind: str) -> Scenario:
    """One variation of a shipped scenario."""
    axes = draw.sample(KINDS[1:-1], 3) if kind == "mixed" else [kind]
    scenario = load_scenario(ROOT / "scenarios" / f"{draw.choice(SCENARIOS)}.yaml")
    frozen, full = Training(mode="frozen"), Training(mode="full")
    trained = [draw.choice([module.training, frozen, full]) for module in scenario.model.modules]
    if all(one.mode == "frozen" for one in trained):
        trained[-1] = full
    modules = tuple(replace(m, training=one) for m, one in zip(scenario.model.modules, trained, strict=True))
    if "tied tables" in axes:
        modules = tuple(map(with_tied_table, modules))
    network, pool = scenario.cluster.network_link, scenario.cluster.pools[0]
    near = replace(pool.node_link, bytes_per_s=pool.node_link.bytes_per_s * 10 ** draw.uniform(-2, 0.5))
    far = replace(
        network,
        bytes_per_s=network.bytes_per_s * 10 ** draw.uniform(-2, 1),
        latency_s=network.latency_s * 10 ** draw.uniform(-1, 2),
    )
    memory_bytes = int(pool.device.memory_bytes * draw.choice([1, draw.uniform(0.15, 0.7)]))
    scarce = replace(pool.device, memory_bytes=memory_bytes)
    pool = replace(pool, device=scarce, nodes=draw.choice([1, 2, 3]), node_link=near)
    pools = (pool, slower(pool, draw)) if "unlike pools" in axes or "prices" in axes else (pool,)
    if "prices" in axes:
        pools = tuple(replace(one, price_per_hour=round(draw.uniform(0.5, 5), 2)) for one in pools)
    rules = replace(
        scenario.constraints,
        sharding=(draw.choice(SHARDINGS),) if "sharding" in axes else (),
        recompute=(draw.choice(["none", "full"]),) if "recompute" in axes else (),
        vp=draw.choice([(2,), (2, 3), (4,)]) if "chunks" in axes else (),
        schedule=() if "chunks" in axes else ("1f1b",),
        pp=tuple(range(1, MOST_STAGES + 1)),
        patches=None if "patches" in axes else (),
        encode_together=None if "together" in axes else (),
        cp=draw.choice([(2,), (2, 4), (4, 8)]) if "cp" in axes else (),
        **dict.fromkeys(("tp", "dp", "microbatch", "modules"), ()),
    )
    technique = replace(
        scenario.technique,
        sequence_parallel=draw.random() < 0.3,
        attention="math" if draw.random() < 0.1 else "flash2",
        fp8="tensor" if draw.random() < 0.1 else "none",
        context_parallel=draw.choice(["ring", "gather"] if "patches" in axes else get_args(ContextParallel)),
        offload=draw.choice(OFFLOADS[1:]) if "host memory" in axes else "none",
        compression=draw.choice(["topk", "fp8"]) if "compression" in axes else "none",
    )
    return replace(
        scenario,
        model=replace(scenario.model, modules=modules),
        cluster=replace(scenario.cluster, pools=pools[:: draw.choice([1, -1])], network_link=far),
        global_batch=draw.choice([8, 16, 32, 48]),
        constraints=rules,
        technique=technique,
    )


def with_tied_table(module: ModelModule) -> ModelModule:
    """The head reads the token table, where the two are of one width."""
    table = module.vocabulary
    if table is None or table.width is not None or table.elsewhere or module.kind != "language_model":
        return module
    return replace(module, vocabulary=replace(table, tied=True))


def slower(pool: Pool, draw: random.Random) -> Pool:
    device = replace(
        pool.device,
        name="slower",
        memory_bytes=int(pool.device.memory_bytes * draw.uniform(0.4, 1)),
        memory_bytes_per_s=pool.device.memory_bytes_per_s * draw.uniform(0.2, 1),
        gemm_fraction=pool.device.gemm_fraction * draw.uniform(0.3, 1),
    )
    return replace(pool, device=device)


def best_ns(space: Space, configuration: Configuration) -> float | None:
    """The closed form of the best cut; None where nothing fits."""
    problem = build_problem(space.prices, space.groups, configuration)
    if configuration.vp > 1:
        stage_of = solve_chunks(problem, configuration.vp).stage_of
    else:
        stage_of = solve_cut(problem, space.coarse.upsets).stage_of
    if stage_of is None:
        return None
    stages = stage_layers(space.groups, stage_of, configuration.stages)
    return cut_stages(space.prices, configuration, stages)[1].objective_s * 1e9


def check(space: Space, draw: random.Random, tally: Tally) -> None:
    """Some configurations of a space, and of every fourth the plan."""
    rows = draw.sample(range(len(space.configurations)), min(len(space.configurations), EACH))
    chosen = [space.configurations[row] for row in rows]
    close_ns = lower_bounds(space.prices, space.groups, chosen).step_ns
    tally.variations += 1
    least, cluster = math.inf, space.prices.scenario.cluster
    for row, configuration, bound_ns in zip(rows, chosen, close_ns.tolist(), strict=True):
        found_ns = best_ns(space, configuration)
        if found_ns is None:
            continue
        above = [float(bound) / found_ns - 1 for bound in (space.first.step_ns[row], bound_ns)]
        least = min(least, found_ns * price(cluster, range(configuration.ranks)))
        tally.checks += 1
        tally.above_first.append(above[0])
        tally.above_close.append(above[1])
        if max(above) > ROUNDING:
            tally.wrong += 1
            print(
                f"above by {above[0]:.2e} and {above[1]:.2e}: {configuration} of {space.prices.scenario.name}",
                flush=True,
            )
    if tally.variations % 4 == 0:
        search(space.prices.scenario, least, tally)


def price(cluster: Cluster, ranks: Iterable[int]) -> float:
    """Of an hour of some ranks; 1 where nothing has a price."""
    if cluster.pools[0].price_per_hour is None:
        return 1.0
    return sum(cluster.pool_of(rank).price_per_hour or math.nan for rank in ranks)


def search(scenario: Scenario, least: float, tally: Tally) -> None:
    """The plan of a variation against its check, and its bound against the best cut found beside it: nanoseconds, times
    the price of its ranks where there are prices."""
    objective = STEP_TIME if scenario.cluster.pools[0].price_per_hour is None else Objective(name="cost")
    try:
        plan = optimize(scenario, time_limit_s=SEARCH_S, objective=objective).plan
    except NoPlanFoundError:
        return
    except InfeasibleError:
        problems = ["no plan fits, and a cut did"] if least < math.inf else []
    else:
        problems = [str(finding) for finding in check_plan(plan)]
        ranks = {rank for stage in range(len(plan.stages)) for rank in plan.stage_ranks(stage)}
        bound = plan.certificate.bound_s * 1e9 * price(plan.scenario.cluster, ranks)
        if bound > least * (1 + ROUNDING):
            problems.append(f"bound {bound}, and a cut of {least}")
    tally.searches += 1
    tally.refused += bool(problems)
    for problem in problems:
        print(f"{scenario.name}: {problem}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checks", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=(*KINDS, *ASKED))
    options = parser.parse_args()
    draw, tallies = random.Random(options.seed), defaultdict[str, Tally](Tally)
    kinds = (options.kind,) if options.kind else KINDS
    asked = f" --kind {options.kind}" if options.kind else ""
    while min(tallies[kind].checks for kind in kinds) < options.checks / len(kinds):
        kind = min(kinds, key=lambda name: tallies[name].checks)
        try:
            space = build_space(varied(draw, kind))
        except MmplanError:
            continue  # such degrees, or such a technique, cannot be
        if space.exact:
            check(space, draw, tallies[kind])
    rows = [
        {
            "variation": kind,
            "scenarios": tally.variations,
            "checks": tally.checks,
            "wrong": tally.wrong,
            "searches": tally.searches,
            "refused": tally.refused,
            "highest_first": f"{max(tally.above_first):.1e}",
            "highest_close": f"{max(tally.above_close):.1e}",
            "median_first": f"{np.median(tally.above_first):.3f}",
            "median_close": f"{np.median(tally.above_close):.3f}",
            "command": f"python benchmarks/bounds.py{asked} --checks {options.checks} --seed {options.seed}",
            "machine": MACHINE,
        }
        for kind, tally in tallies.items()
    ]
    if options.kind:
        print(*rows, sep="\n")
    else:
        write_rows("bounds.csv", rows)


if __name__ == "__main__":
    main()
