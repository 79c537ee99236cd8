"""Small random jobs of one to three modalities, some with experts, and the best plan of each by trying all cuts."""

import math
from collections.abc import Callable
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from brute_force import chunk_cuts, chunk_value, numbered, partition_value
from pipeline_toys import DEVICE, LINK, fixed, scenario

from mmplan.cost_models.build import build_graph
from mmplan.errors import InfeasibleError
from mmplan.planner.check import check_plan
from mmplan.planner.configuration import CHUNKS, Configuration
from mmplan.planner.configurations import list_configurations
from mmplan.planner.cut_plan import cut_stages
from mmplan.planner.cut_problem import CutProblem
from mmplan.planner.pool_order import in_pool_orders, with_techniques
from mmplan.planner.priced_groups import priced_groups
from mmplan.planner.problem import build_problem
from mmplan.planner.quantise import NS_PER_S, seconds
from mmplan.planner.search import optimize
from mmplan.planner.space import build_space, stage_layers
from mmplan.planner.stage_solver import solve_cut
from mmplan.scenario.cluster import Cluster, Pool
from mmplan.scenario.scenario import Constraints, Moe, Scenario
from mmplan.scenario.technique import OFFLOADS

Worth = Callable[[Scenario, Configuration], float]
MOST_GROUPS = 9  # 7,770 partitions into four stages


def random_job(seed: int) -> Scenario:
    """At most 12 layers on at most 8 devices; often a no-split zone, scarce memory, or two unlike pools."""
    random = np.random.default_rng(seed)
    encoders = int(random.integers(0, 3))
    layers = {"llm_layers": int(random.integers(1, 4)), "vision_layers": int(encoders > 0), "audio_layers": 0}
    if encoders == 1:
        layers["vision_layers"] = int(random.integers(1, 4))
    if encoders == 2:
        layers |= {"audio_layers": 1, "llm_layers": int(random.integers(1, 3))}
    job = scenario(**layers, frozen_vision=bool(random.random() < 0.3), global_batch=int(random.choice([4, 6, 8])))
    if seed % 5 == 3:
        job = with_experts(job)
    if seed % 3 == 1:
        job = with_tied_table(job)
    names = [layer.id for layer in build_graph(job).layers()]
    rules = Constraints(
        no_split=tuple(name for name in names if random.random() < random.choice([0.0, 0.2])),
        tp=(1, 2) if random.random() < 0.5 else (1,),
        pp=tuple(sorted({int(pp) for pp in random.integers(1, 5, 2)})),
        microbatch=(int(random.choice([1, 2])),),
        sharding=("none", str(random.choice(["optimizer", "parameters"]))),
        recompute=("none", "full") if random.random() < 0.5 else (),
        memory_headroom=0.0,
        vp=CHUNKS,
        patches=None if seed % 4 == 1 else (),
        encode_together=None if seed % 6 in (2, 5) else (),
        etp=(int(np.random.default_rng((seed, 1)).choice([1, 2])),) if seed % 10 == 3 else (),
    )
    return replace(job, cluster=_cluster(random), constraints=rules)


def with_tied_table(job: Scenario) -> Scenario:
    """The language model's head reads the matrix of its token table."""
    modules = tuple(
        module if module.vocabulary is None else replace(module, vocabulary=replace(module.vocabulary, tied=True))
        for module in job.model.modules
    )
    return replace(job, model=replace(job.model, modules=modules))


def wider_job(seed: int) -> Scenario:
    """A random job with axes that are searched where asked: host memory, cp (with longer texts), score
    matrices with their recomputation, GPipe, tp with split rows or whole ones."""
    random, job = np.random.default_rng((seed, 2)), random_job(seed)
    places = random.choice(OFFLOADS, int(random.integers(1, 4)), replace=False).tolist()
    if long := bool(random.random() < 0.4):
        job = replace(job, data=replace(job.data, text_tokens=fixed(float(random.choice([520, 1100])))))
    host_bytes_per_s = float(10 ** random.uniform(8, 11))
    pools = tuple(
        replace(
            pool,
            device=replace(
                pool.device,
                memory_bytes=pool.device.memory_bytes * (40 if long else 1),
                host_bytes_per_s=host_bytes_per_s,
            ),
        )
        for pool in job.cluster.pools
    )
    rules = replace(
        job.constraints,
        offload=tuple(places),
        sharding=(*job.constraints.sharding, "parameters"),
        schedule=("gpipe",) if random.random() < 0.15 else (),
        recompute=job.constraints.recompute and ("none", "selective", "full"),
        sequence_parallel=(False, True) if seed % 3 == 2 else (),
    )
    technique = replace(
        job.technique,
        attention="math" if random.random() < 0.2 else "flash2",
        sequence_parallel=bool(random.random() < 0.3),
        context_parallel="all-to-all" if random.random() < 0.2 and seed % 4 != 1 else "ring",
    )
    network = replace(job.cluster.network_link, bytes_per_s=float(10 ** random.uniform(5, 9.3)))
    pools = tuple(replace(pool, node_link=network if random.random() < 0.5 else pool.node_link) for pool in pools)
    cluster = replace(job.cluster, pools=pools, network_link=network)
    return replace(job, constraints=rules, technique=technique, cluster=cluster)


def around_its_need(job: Scenario, seed: int) -> Scenario | None:
    """With about as much memory as the quickest plan needs where there is plenty: from 0.7 to 1.6 times, so that limits
    bind and most jobs have a plan; None where the constraints leave no configuration."""

    most_bytes = max(pool.device.memory_bytes for pool in job.cluster.pools)

    def with_memory(memory_bytes: float) -> Scenario:
        pools = tuple(
            replace(
                pool,
                device=replace(pool.device, memory_bytes=int(memory_bytes * pool.device.memory_bytes / most_bytes)),
            )
            for pool in job.cluster.pools
        )
        return replace(job, cluster=replace(job.cluster, pools=pools))

    try:
        roomy = optimize(with_memory(2.0**40), gap=0.05).plan
    except InfeasibleError:
        return None
    need_bytes = max(stage.memory_bytes for stage in roomy.stages)
    return with_memory(need_bytes * 10 ** np.random.default_rng((seed, 3)).uniform(-0.15, 0.2))


def with_experts(job: Scenario) -> Scenario:
    """Four experts in every block of the language model: ep of 1, 2 or 4, each expert on one rank or on tp."""
    modules = tuple(
        replace(module, transformer=replace(module.transformer, moe=Moe(experts=4, topk=2, expert_ffn=32)))
        if module.kind == "language_model" and module.transformer is not None
        else module
        for module in job.model.modules
    )
    return replace(job, model=replace(job.model, modules=modules))


def _cluster(random: np.random.Generator) -> Cluster:
    def pool(devices: int) -> Pool:
        memory = 1000 + int(10 ** random.uniform(4.3, 6.0))
        device = replace(DEVICE, memory_bytes=memory, gemm_fraction=float(random.uniform(0.1, 0.9)))
        return Pool(device=device, nodes=1, devices_per_node=devices, node_link=LINK)

    if random.random() < 0.3:
        device = pool(int(random.integers(1, 5)))
        slower = replace(device.device, name="slow toy", memory_bytes_per_s=device.device.memory_bytes_per_s / 3)
        pools = (
            device,
            replace(
                pool(int(random.integers(1, 5))),
                device=replace(slower, memory_bytes=int(device.device.memory_bytes * 0.8)),
            ),
        )
    else:
        pools = (pool(int(random.choice([1, 2, 3, 4, 6, 8]))),)
    return Cluster(name="random", pools=pools, network_link=replace(LINK, bytes_per_s=2e9))


def groups_of(job: Scenario) -> int:
    """Pieces that the zones leave."""
    return len(priced_groups(job).groups.groups)


def priced_job(seed: int) -> Scenario:
    """A random job on two pools, which have prices and often unlike devices."""
    random, job = np.random.default_rng((seed, 3)), random_job(seed)
    first, *others = job.cluster.pools
    if not others:
        first = replace(first, devices_per_node=max(1, first.devices_per_node // 2))
        fraction = float(random.choice([first.device.gemm_fraction, random.uniform(0.1, 0.9)]))
        others = [replace(first, device=replace(first.device, gemm_fraction=fraction))]
    prices = random.choice([0.35, 1.29, 1.99, 2.5, 4.1], 2).tolist()
    pools = tuple(replace(pool, price_per_hour=price) for pool, price in zip((first, *others), prices, strict=True))
    most = max(1, min(4, sum(pool.device_count for pool in pools) // 2))  # so that cheap ranks alone are often too few
    rules = replace(job.constraints, pp=(most, most + 1) if seed % 3 else tuple(sorted({1, *job.constraints.pp})))
    return replace(job, cluster=replace(job.cluster, pools=pools), constraints=rules)


def alike(job: Scenario, configuration: Configuration) -> float:
    """Ranks do not count."""
    return 1.0


def price_per_hour(job: Scenario, configuration: Configuration) -> float:
    """Of each rank that works."""
    own = configuration.tp * configuration.cp * configuration.dp * (configuration.pp - sum(configuration.mesh_stages))
    ranks = [*range(own)]
    for mesh, stages in zip(configuration.meshes, configuration.mesh_stages, strict=True):
        ranks += range(mesh.first_rank, mesh.first_rank + mesh.tp * mesh.cp * mesh.dp * stages)
    return sum(job.cluster.pool_of(rank).price_per_hour or math.nan for rank in ranks)


def best_by_trying(job: Scenario, worth: Worth = alike) -> tuple[float | None, int]:
    """Least closed form times what its ranks are worth over all pool orders, techniques, configurations and cuts, None
    where nothing fits; how many were tried.

    A cut is scored in real seconds where its whole nanoseconds, which are never more, could beat the best.
    """
    best: float | None = None
    tried = 0
    for ordered in with_techniques(in_pool_orders(job, priced=worth is price_per_hour)):
        priced = priced_groups(ordered)
        try:
            configurations = list_configurations(ordered, len(priced.groups.groups))
        except InfeasibleError:
            continue
        for configuration in configurations:
            problem = build_problem(priced.prices, priced.groups, configuration)
            weight = worth(ordered, configuration)
            if configuration.vp > 1:
                for cut in chunk_cuts(problem, configuration.vp):
                    tried += 1
                    floor = chunk_value(problem, cut)
                    if floor is None or (best is not None and weight * seconds(floor) >= best):
                        continue
                    chunks = [[layer for group in chunk for layer in priced.groups.groups[group]] for chunk in cut]
                    value = weight * cut_stages(priced.prices, configuration, chunks)[1].objective_s
                    best = value if best is None else min(best, value)
                continue
            for block_of in numbered(problem):
                tried += 1
                floor = partition_value(problem, block_of)
                if floor is None or (best is not None and weight * seconds(floor) >= best):
                    continue
                stages = stage_layers(priced.groups, _along_edges(problem, block_of), problem.stages)
                value = weight * cut_stages(priced.prices, configuration, stages)[1].objective_s
                best = value if best is None else min(best, value)
    return best, tried


def require_the_best_of_everything(job: Scenario) -> None:
    """The search agrees with trying everything, and its bound is not above. What it minimises is below the closed form
    by less than the launch of an operator, see `problem.py`."""
    best_s, _ = best_by_trying(job)
    if best_s is None:
        with pytest.raises(InfeasibleError):
            optimize(job, gap=0.0)
        return
    plan = optimize(job, gap=0.0).plan
    assert plan.certificate.objective_s == pytest.approx(best_s, abs=job.cluster.pools[0].device.launch_s)
    assert plan.certificate.bound_s <= best_s
    assert check_plan(plan) == ()


def cuts_above_bounds(of: Scenario) -> int:
    """How many configurations have a cut; no bound of them is above the best one."""
    space, solved = build_space(of), 0
    first_ns = space.bounds_ns.copy()
    space.bounds.sharpen(np.arange(len(space.configurations)))
    for index, configuration in enumerate(space.configurations):
        best = solve_cut(build_problem(space.prices, space.groups, configuration), space.coarse.upsets)
        if best.stage_of is not None:
            stages = stage_layers(space.groups, best.stage_of, configuration.stages)
            best_ns = cut_stages(space.prices, configuration, stages)[1].objective_s * NS_PER_S
            assert first_ns[index] <= space.bounds_ns[index] <= best_ns
            solved += 1
    return solved


def _along_edges(problem: CutProblem, block_of: list[int]) -> list[int]:
    """The same blocks, numbered along the edges."""
    if problem.kinds:
        return block_of
    blocks: nx.DiGraph[int] = nx.DiGraph()
    blocks.add_nodes_from(range(problem.stages))
    pairs = {(block_of[edge.producer], block_of[edge.consumer]) for edge in problem.edges}
    blocks.add_edges_from((a, b) for a, b in pairs if a != b)
    number = {block: place for place, block in enumerate(nx.topological_sort(blocks))}
    return [number[block] for block in block_of]
