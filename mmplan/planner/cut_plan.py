"""A plan with its numbers from a cut: closed-form step time in real seconds, memory of every stage."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from mmplan.cost_models.graph import Edge
from mmplan.cost_models.layout import PLAINEST, Layout, RecomputeLevel, Trained
from mmplan.planner.border import TensorWay, quickest
from mmplan.planner.chunk_cut import most_held
from mmplan.planner.configuration import Configuration
from mmplan.planner.features import features_bytes
from mmplan.planner.plan import Certificate, Plan, StagePlan, Status, module_of, scenario_hash
from mmplan.planner.pricing import Prices
from mmplan.planner.problem import (
    allowed_levels,
    border_ways_s,
    finish_s,
    lag_s,
    machine_of,
    one_node,
    stage_finish_s,
)
from mmplan.planner.schedules.in_flight import encoded_in_flight, held_by_chunks, in_flight, stage_depth
from mmplan.planner.schedules.looped import interleaved
from mmplan.planner.schedules.plan_problem import plan_problem, whole_backwards
from mmplan.planner.schedules.problem import NotApplicable
from mmplan.planner.schedules.text import schedule_text
from mmplan.planner.sides import Side, side_index, sides_of
from mmplan.planner.tied_cut import copied, tied_s


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """The three terms of the closed form: (m - 1) * busiest stage, the critical path, the longest finish."""

    repeat_s: float
    critical_path_s: float
    finish_s: float

    @property
    def objective_s(self) -> float:
        return self.repeat_s + self.critical_path_s + self.finish_s


def cut_stages(
    prices: Prices,
    configuration: Configuration,
    stages: Sequence[Sequence[str]],
    levels: Sequence[RecomputeLevel] | None = None,
) -> tuple[tuple[StagePlan, ...], StepTime]:
    """Numbers of every stage and of the step.

    Args:
        stages: layer ids of each stage; stages numbered along the edges.
        levels: what each stage recomputes; None: no more than its memory demands.
    """
    if configuration.vp > 1:
        return _chunk_stages(prices, configuration, stages, levels[0] if levels and len(set(levels)) == 1 else None)
    cut = _cut_edges(prices, stages)
    depths = [1] * len(stages)
    for source, target, _ in cut:
        factor = configuration.batch_factor if _encodes(configuration, stages[source]) else 1
        depths[source] = max(depths[source], stage_depth(depths[target], factor))
    ahead = [bool(ids) and module_of(ids[0]) in configuration.prefetch for ids in stages]
    waiting_bytes = features_bytes(cut, ahead, partial(step_bytes, prices, configuration))
    sides = sides_of(prices, configuration)
    which = [side_index(sides, ids) for ids in stages]
    wanted: Sequence[RecomputeLevel | None] = [None] * len(stages) if levels is None else levels
    built = tuple(
        _stage(sides[side], which[:index].count(side), tuple(ids), depth, level, features)
        for index, (side, ids, depth, level, features) in enumerate(
            zip(which, stages, depths, wanted, waiting_bytes, strict=True)
        )
    )
    work_s = [stage.forward_s + stage.backward_s for stage in built]
    paths_s = work_s
    if configuration.batch_factor > 1 and len(stages) > 1:
        paths_s = [work + more for work, more in zip(work_s, _at_once_s(prices, configuration, built), strict=True)]
    tails_s = list(paths_s)
    for source, target, edge in cut:
        if ahead[source] and not ahead[target]:
            continue  # what it reads was made in the last step
        way_s = lag_s(prices, configuration, edge, sides[which[source]].mesh, sides[which[target]].mesh)
        tails_s[source] = max(tails_s[source], paths_s[source] + way_s + tails_s[target])
    time = StepTime(
        repeat_s=(configuration.microbatches - 1) * max(work_s),
        critical_path_s=max(tails_s),
        finish_s=max(stage.finish_s for stage in built),
    )
    return built, time


def step_bytes(prices: Prices, configuration: Configuration, edge: Edge) -> int:
    """Of a tensor in all microbatches of a step."""
    loads = prices.loads(configuration.microbatch_size)
    return configuration.microbatches * configuration.layout.sent_bytes(edge, prices.graph, loads, prices.scenario)


def _at_once_s(prices: Prices, configuration: Configuration, built: Sequence[StagePlan]) -> list[float]:
    """By how much longer than their part of one microbatch those layers of each stage work that run several at once."""
    found = []
    for index, stage in enumerate(built):
        layout = configuration.layout_of(index, prices.scenario.cluster).at(stage.recompute)
        priced = prices.layers(layout, configuration.microbatch_size)
        found.append(sum((priced[layer].together - 1) * priced[layer].work_s for layer in stage.layers))
    return found


def _chunk_stages(
    prices: Prices, configuration: Configuration, chunks: Sequence[Sequence[str]], level: RecomputeLevel | None
) -> tuple[tuple[StagePlan, ...], StepTime]:
    """The same of several chunks per rank, which recompute alike; see `chunk_cut`."""
    p, v, m = configuration.pp, configuration.vp, configuration.microbatches
    ranks = [configuration.layout_of(rank, prices.scenario.cluster) for rank in range(p)]
    ends_s = [_ends_s(prices, configuration, ranks[place % p], tuple(ids)) for place, ids in enumerate(chunks)]
    levels = allowed_levels(prices.scenario) if level is None else (level,)
    ways = [_chunks_at(prices, configuration, one, chunks, ends_s) for one in levels]
    fitting = [built for built in ways if all(stage.memory_bytes <= stage.capacity_bytes for stage in built)]
    if fitting:
        built = min(fitting, key=_busiest_s)
    else:
        built = min(ways, key=lambda built: max(stage.memory_bytes for stage in built))
    busiest_s = _busiest_s(built)
    finish = []
    for rank in range(p):
        layout = configuration.layout_of(rank, prices.scenario.cluster)
        priced = prices.layers(layout, configuration.microbatch_size)
        held = [layer for ids in chunks[rank::p] for layer in ids]
        copies = [one.copy for ids in chunks[rank::p] for one in copied(prices, layout, ids)]
        trained = sum(copies, sum((priced[layer].trained for layer in held), Trained()))
        alone_s = finish_s(prices, configuration, trained, layout.pools)
        finish.append(alone_s + tied_s(prices, configuration, held, one_node(configuration, prices.scenario.cluster)))
    time = StepTime(
        repeat_s=v * (m - 1) * busiest_s,
        critical_path_s=(v + p - 1) * busiest_s + sum(_boundary_lags_s(prices, configuration, chunks)),
        finish_s=max(finish),
    )
    return built, time


def _busiest_s(stages: Sequence[StagePlan]) -> float:
    return max(stage.forward_s + stage.backward_s for stage in stages)


def _chunks_at(
    prices: Prices,
    configuration: Configuration,
    level: RecomputeLevel,
    chunks: Sequence[Sequence[str]],
    ends_s: Sequence[float],
) -> tuple[StagePlan, ...]:
    """All chunks at one level of recomputation; `ends_s` of each at the end of a step, whatever it recomputes."""
    p, size, cluster = configuration.pp, configuration.microbatch_size, prices.scenario.cluster
    layouts = [configuration.layout_of(rank, cluster).at(level) for rank in range(p)]
    built = [
        _at_level(prices, configuration, layouts[place % p], tuple(ids), (0, 0), ends)
        for place, (ids, ends) in enumerate(zip(chunks, ends_s, strict=True))
    ]
    for rank, layout in enumerate(layouts):
        moments = held_by_chunks(p, configuration.vp, configuration.microbatches, rank)
        priced = prices.layers(layout, size)
        memory_bytes = machine_of(prices.scenario, layout.pools).reserved_bytes + most_held(
            [sum(priced[layer].state_bytes for layer in ids) for ids in chunks[rank::p]],
            [sum(priced[layer].kept_bytes for layer in ids) for ids in chunks[rank::p]],
            moments,
            prices.working_bytes(layout, size),
        )
        for loop in range(configuration.vp):
            place = loop * p + rank
            returns = any(prices.graph.layer(layer).has_backward for layer in chunks[place])
            alive = max(moment[loop] for moment in moments) if returns else 1
            built[place] = replace(built[place], in_flight=alive, memory_bytes=memory_bytes)
    return tuple(built)


def _boundary_lags_s(prices: Prices, configuration: Configuration, chunks: Sequence[Sequence[str]]) -> list[float]:
    """Behind each chunk but the last the longest way of a tensor that is read later."""
    lags_s = [0.0] * (len(chunks) - 1)
    for source, target, edge in _cut_edges(prices, chunks):
        way_s = lag_s(prices, configuration, edge, configuration.mesh, configuration.mesh)
        lags_s[source:target] = [max(known_s, way_s) for known_s in lags_s[source:target]]
    return lags_s


def _encodes(configuration: Configuration, ids: Sequence[str]) -> bool:
    """Whether layers run several microbatches at once."""
    return any(module_of(layer) in configuration.together for layer in ids)


def _stage(
    side: Side, index: int, ids: tuple[str, ...], depth: int, level: RecomputeLevel | None, waiting_bytes: int
) -> StagePlan:
    """At the given level, else at that with the least work of those that fit, by its plainest name; the leanest where
    none does."""
    prices, configuration = side.prices, side.configuration
    schedule, microbatches = configuration.schedule, configuration.microbatches
    alive = in_flight(schedule, microbatches, depth)
    held = alive, int(encoded_in_flight(microbatches, alive, configuration.batch_factor))
    ranks = configuration.layout_of(index, prices.scenario.cluster)
    levels = allowed_levels(prices.scenario) if level is None else (level,)
    ends_s = _ends_s(prices, configuration, ranks, ids)
    options = [_at_level(prices, configuration, ranks.at(one), ids, held, ends_s, waiting_bytes) for one in levels]
    fitting = [stage for stage in options if stage.memory_bytes <= stage.capacity_bytes]
    if not fitting:
        return min(options, key=lambda stage: stage.memory_bytes)
    return min(fitting, key=lambda stage: (stage.forward_s + stage.backward_s, PLAINEST.index(stage.recompute)))


def _ends_s(prices: Prices, configuration: Configuration, layout: Layout, ids: tuple[str, ...]) -> float:
    """What the stage does at the end of a step, whatever it recomputes."""
    of_kinds = prices.of_kinds(layout, configuration.microbatch_size)
    trained = sum((of_kinds[prices.kind_of[layer]].trained for layer in ids), Trained())
    return stage_finish_s(prices, configuration, ids, layout, trained)


def _at_level(
    prices: Prices,
    configuration: Configuration,
    layout: Layout,
    ids: tuple[str, ...],
    held: tuple[int, int],
    ends_s: float,
    waiting_bytes: int = 0,
) -> StagePlan:
    """`held`: microbatches in flight, and those of layers that run several at once; `waiting_bytes`: features
    of other steps."""
    size, machine = configuration.microbatch_size, machine_of(prices.scenario, layout.pools)
    of_kinds = prices.of_kinds(layout, size)
    priced = [of_kinds[prices.kind_of[layer]] for layer in ids]
    state_bytes = sum(one.state_bytes for one in priced)
    kept_bytes = sum(held[one.together > 1] * one.kept_bytes for one in priced)
    at_work_bytes = machine.reserved_bytes + prices.working_bytes(layout, size)
    return StagePlan(
        layers=ids,
        forward_s=sum(one.forward_s for one in priced),
        backward_s=sum(one.backward_s for one in priced),
        finish_s=ends_s,
        in_flight=held[0],
        memory_bytes=at_work_bytes + state_bytes + kept_bytes + waiting_bytes,
        capacity_bytes=machine.capacity_bytes,
        recompute=layout.recompute,
    )


def _cut_edges(prices: Prices, stages: Sequence[Sequence[str]]) -> list[tuple[int, int, Edge]]:
    """(source, target, edge) of what passes between stages, the last sources first."""
    stage_of = {layer: index for index, ids in enumerate(stages) for layer in ids}
    cut = []
    for edge in prices.graph.edges():
        source, target = stage_of[edge.producer], stage_of[edge.consumer]
        if source > target:
            raise ValueError(f"edge {edge.name} leads from stage {source} back to stage {target}")
        if source != target:
            cut.append((source, target, edge))
    return sorted(cut, key=lambda one: -one[0])


def plan_from_cut(
    prices: Prices,
    configuration: Configuration,
    stages: Sequence[Sequence[str]],
    *,
    bound_s: float,
    status: Status,
    wall_s: float,
    levels: Sequence[RecomputeLevel] | None = None,
) -> Plan:
    """The plan of a cut, certified with what the caller has proved. `bound_s` above the objective counts as equal."""
    built, time = cut_stages(prices, configuration, stages, levels)
    bound_s = min(bound_s, time.objective_s)
    plan = Plan(
        scenario=prices.scenario,
        scenario_hash=scenario_hash(prices.scenario),
        dp=configuration.dp,
        tp=configuration.tp,
        cp=configuration.cp,
        ep=configuration.ep,
        etp=configuration.etp,
        sharding=configuration.sharding,
        spread=configuration.spread,
        patches=configuration.patches,
        together=configuration.together,
        batch_factor=configuration.batch_factor,
        prefetch=configuration.prefetch,
        microbatch_size=configuration.microbatch_size,
        microbatches=configuration.microbatches,
        schedule=configuration.schedule,
        stages=built,
        meshes=configuration.meshes,
        ways=_tensor_ways(prices, configuration),
        certificate=Certificate(
            objective_s=time.objective_s,
            bound_s=bound_s,
            gap=(time.objective_s - bound_s) / time.objective_s if time.objective_s > 0 else 0.0,
            status=status,
            wall_s=wall_s,
        ),
    )
    if configuration.vp == 1:
        return plan
    placed = replace(plan, placement=tuple(chunk % configuration.pp for chunk in range(configuration.stages)))
    problem = plan_problem(placed, prices.graph, prices.costs)
    order = interleaved(problem)
    assert not isinstance(order, NotApplicable)
    return replace(placed, orders=tuple(schedule_text(whole_backwards(placed, order)).split("\n")))


def _tensor_ways(prices: Prices, configuration: Configuration) -> tuple[TensorWay, ...]:
    """Of tensors between unlike meshes that do not cross as copies; one for each producer and module that reads it."""
    if not configuration.meshes:
        return ()
    mesh_of = {name: mesh for mesh in configuration.meshes for name in mesh.modules}
    found: dict[TensorWay, None] = {}
    for edge in prices.graph.edges():
        reader = module_of(edge.consumer)
        source, target = (mesh_of.get(name, configuration.mesh) for name in (module_of(edge.producer), reader))
        if source != target:
            way = quickest(border_ways_s(prices, configuration, edge, source, target))
            found.update({TensorWay(producer=edge.producer, reader=reader, way=way): None} if way != "copies" else {})
    return tuple(found)
