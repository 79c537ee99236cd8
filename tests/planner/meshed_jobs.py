"""The best plan of a small job by trying every configuration with meshes of their own and every cut of each."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

from brute_force import partition_value, partitions
from pipeline_toys import fixed
from random_jobs import Worth, alike, price_per_hour, random_job

from mmplan.errors import InfeasibleError
from mmplan.planner.configuration import Configuration
from mmplan.planner.configurations import list_configurations
from mmplan.planner.cut_plan import cut_stages
from mmplan.planner.cut_problem import CutProblem
from mmplan.planner.mesh import Mesh
from mmplan.planner.mesh_choices import Apart, mesh_choices
from mmplan.planner.mesh_problem import meshed_groups, meshed_problem
from mmplan.planner.pool_order import in_pool_orders
from mmplan.planner.priced_groups import priced_groups
from mmplan.planner.quantise import seconds
from mmplan.planner.space import stage_layers
from mmplan.scenario.scenario import Scenario


def meshed_job(seed: int) -> Scenario:
    """A random job in which meshes of their own are free, and so is the number of stages."""
    job = random_job(seed)
    return replace(job, constraints=replace(job.constraints, modules=None, pp=()))


def long_job(seed: int) -> Scenario:
    """The same with texts so long, and memory so large, that the rows of the language model lie on two ranks."""
    job = meshed_job(seed)
    pools = tuple(
        replace(pool, device=replace(pool.device, memory_bytes=40 * pool.device.memory_bytes))
        for pool in job.cluster.pools
    )
    rules = replace(job.constraints, etp=(), cp=(2,), recompute=("none",), sharding=("none",))
    data = replace(job.data, text_tokens=fixed(640.0))
    return replace(job, data=data, cluster=replace(job.cluster, pools=pools), constraints=rules)


def best_meshed_by_trying(job: Scenario, best: float | None, worth: Worth = alike) -> tuple[float | None, int]:
    """The least closed form, times what its ranks are worth, below `best` over all choices, rows, meshes, places and
    cuts; how many cuts were tried."""
    tried = 0
    for ordered in in_pool_orders(job, priced=worth is price_per_hour):
        priced = priced_groups(ordered)
        for apart in mesh_choices(ordered):
            meshed = meshed_groups(priced.groups, [one.modules for one in apart])
            if meshed is None:
                continue
            sizes = [len(groups.groups) for groups, _ in meshed.parts]
            for configuration in meshed_configurations(ordered, apart, sizes, len(priced.groups.groups)):
                problem = meshed_problem(priced.prices, meshed, configuration)
                weight = worth(ordered, configuration)
                if best is not None and weight * seconds(_least(problem)) >= best:
                    continue
                for stage_of in _cuts(problem, len(ordered.cluster.pools) > 1):
                    tried += 1
                    floor = partition_value(problem, stage_of)
                    if floor is None or (best is not None and weight * seconds(floor) >= best):
                        continue
                    if any(stage_of[edge.producer] > stage_of[edge.consumer] for edge in problem.edges):
                        continue  # another numbering of the same stages
                    stages = stage_layers(priced.groups, stage_of, problem.stages)
                    value = weight * cut_stages(priced.prices, configuration, stages)[1].objective_s
                    best = value if best is None else min(best, value)
    return best, tried


def _least(problem: CutProblem) -> int:
    """Work of each mesh spread evenly over its stages."""
    work = [0] * (max(problem.mesh_of) + 1)
    count = [0] * len(work)
    for value, mesh in zip(problem.work_ns, problem.mesh_of, strict=True):
        work[mesh] += value
    for stage in range(problem.stages):
        count[problem.kind(stage).mesh] += 1
    return (problem.microbatches - 1) * max(w // c for w, c in zip(work, count, strict=True)) + max(work)


def _cuts(problem: CutProblem, numbered: bool) -> Iterator[list[int]]:
    """Every way to cut each mesh into its stages, in every numbering along the edges, or in all where places differ."""
    meshes = range(max(problem.mesh_of) + 1)
    stages = [[s for s in range(problem.stages) if problem.kind(s).mesh == mesh] for mesh in meshes]
    groups = [[g for g in range(problem.groups) if problem.mesh_of[g] == mesh] for mesh in meshes]
    ways = []
    for own, members in zip(stages, groups, strict=True):
        blocks = list(partitions(len(members), len(own)))
        ways.append([[order[b] for b in block] for block in blocks for order in permutations(own)])
    for parts in product(*ways):
        stage_of = [0] * problem.groups
        for members, part in zip(groups, parts, strict=True):
            for group, stage in zip(members, part, strict=True):
                stage_of[group] = stage
        if all(stage_of[edge.producer] <= stage_of[edge.consumer] for edge in problem.edges):
            yield stage_of


def meshed_configurations(
    job: Scenario, apart: tuple[Apart, ...], sizes: list[int], groups: int
) -> Iterator[Configuration]:
    """Every row with every mesh of every choice's modules, at each place behind the row's ranks."""
    devices, names = job.cluster.device_count, {name for one in apart for name in one.modules}
    try:
        rows = list_configurations(replace(job, constraints=replace(job.constraints, pp=())), groups)
    except InfeasibleError:
        return
    seen = set()
    for row in rows:
        base = replace(row, spread=tuple(name for name in row.spread if name not in names))
        if base.batch_factor > 1:  # beside meshes each microbatch runs alone
            continue
        if base in seen or base.ranks >= devices or base.pp > sizes[-1]:
            continue
        seen.add(base)
        together = base.dp * base.microbatch_size
        each = [
            [
                (tp, cp, ep, dp, pp)
                for tp, cp, ep in one.widths
                for dp in range(1, together + 1)
                for pp in range(1, size + 1)
                if together % dp == 0 and tp * cp * dp % ep == 0 and tp * cp * dp * pp <= devices - base.ranks
            ]
            for one, size in zip(apart, sizes, strict=False)
        ]
        for degrees in product(*each):
            stages = base.pp + sum(pp for *_, pp in degrees)
            if job.constraints.pp and stages not in job.constraints.pp:
                continue
            for firsts in _places(job, base.ranks, degrees):
                meshes = tuple(
                    Mesh(
                        modules=one.modules,
                        tp=tp,
                        cp=cp,
                        ep=ep,
                        dp=dp,
                        first_rank=first,
                        patches=one.patches if cp > 1 else (),
                    )
                    for one, (tp, cp, ep, dp, _), first in zip(apart, degrees, firsts, strict=True)
                )
                depths = tuple(pp for *_, pp in degrees)
                yield replace(base, pp=stages, meshes=meshes, mesh_stages=depths)


def _places(job: Scenario, begin: int, degrees: tuple[tuple[int, int, int, int, int], ...]) -> Iterator[list[int]]:
    """First ranks: whole groups of tp behind what comes before, or the start of a later pool."""
    pools = job.cluster.pools
    starts = [sum(pool.device_count for pool in pools[:index]) for index in range(1, len(pools))]
    for firsts in product(range(job.cluster.device_count), repeat=len(degrees)):
        end, good = begin, True
        for first, (tp, cp, _, dp, pp) in zip(firsts, degrees, strict=True):
            good &= first == -(-end // tp) * tp or (first in starts and first >= end)
            end = first + tp * cp * dp * pp
        if good and end <= job.cluster.device_count:
            yield list(firsts)
