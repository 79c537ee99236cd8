"""Are the seconds and bytes that a plan records what its scenario gives? The closed form, computed a second time.

With m microbatches per replica, T_s = forward + backward of stage s, and lag = the seconds a cut tensor (and its
gradient, where one flows back) is on its way:

    tail_s = T_s + max over cut edges s -> r of (lag + tail_r)
    objective = (m - 1) * max T_s + max tail_s + max finish_s

Layers that run k microbatches at once count in T_s with a k-th part of their seconds for these, and in tail_s, where
there is more than one stage, with all of them; so does the lag of a tensor between two of them. An edge from a stage
that works a step ahead is no part of a tail.

And with v stages on each of p pipeline ranks, laid round them in order, for interleaved 1F1B

    objective = (v m + p - 1) * max T_s + sum over stages s of max lag from s or before to behind s + max finish_rank
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import lcm

from mmplan.cost_models.cost_model import CostModel
from mmplan.cost_models.graph import ComputationGraph, Edge
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.layout import Layout, Trained
from mmplan.cost_models.load import Load, Loads
from mmplan.cost_models.loads import mean_loads
from mmplan.cost_models.peak_loads import peak_loads
from mmplan.cost_models.planned_memory import (
    handed_out_bytes,
    loss_working_bytes,
    planned_excess_bytes,
    planned_kept_bytes,
    planned_state_bytes,
    planned_working_bytes,
)
from mmplan.cost_models.ties import tied_share, trained_ties, trained_together
from mmplan.planner.check_ahead import waiting_bytes
from mmplan.planner.check_schedule import held_microbatches
from mmplan.planner.finding import Finding
from mmplan.planner.mesh import Mesh, message_bytes, messages
from mmplan.planner.plan import Plan, module_of
from mmplan.scenario.scenario import DTYPE_BYTES
from mmplan.units import format_bytes, format_seconds

# Sums of float seconds in another order differ by some 1e-15 per term; a real error is far above this.
_RELATIVE_TOLERANCE = 1e-6


def check_numbers(plan: Plan, graph: ComputationGraph, costs: CostModel) -> tuple[Finding, ...]:
    """Recorded times, memory, objective and bound of a plan whose structure is sound, for mean microbatches."""
    sizes = [plan.samples(stage) for stage in range(len(plan.stages))]
    means = {size: mean_loads(plan.scenario, size) for size in set(sizes)}
    loads = [means[size] for size in sizes]
    return (
        *_stage_times(plan, graph, costs, loads),
        *_stage_memory(plan, graph, loads),
        *_certificate(plan, graph, costs, loads),
    )


def _differs(recorded: float, computed: float) -> bool:
    return abs(recorded - computed) > _RELATIVE_TOLERANCE * max(abs(recorded), abs(computed))


def _stage_depths(plan: Plan, graph: ComputationGraph) -> list[int]:
    """Stages on the longest way to a sink; stages are numbered along the edges, so the last comes first here."""
    stage_of = plan.stage_of_layer()
    follows: list[set[int]] = [set() for _ in plan.stages]
    for edge in graph.edges():
        if stage_of[edge.producer] != stage_of[edge.consumer]:
            follows[stage_of[edge.producer]].add(stage_of[edge.consumer])
    depths = [1] * plan.pp
    for stage in reversed(range(plan.pp)):
        depths[stage] = max((depths[later] + 1 for later in follows[stage]), default=1)
        if follows[stage] and any(module_of(layer) in plan.together for layer in plan.stages[stage].layers):
            depths[stage] += plan.batch_factor  # it works a whole group ahead
    return depths


def _stage_times(plan: Plan, graph: ComputationGraph, costs: CostModel, loads: Sequence[Loads]) -> Iterator[Finding]:
    """Seconds of each stage."""
    finish_s = _finish_s(plan, graph, costs)
    for index, stage in enumerate(plan.stages):
        layers, layout = [graph.layer(layer) for layer in stage.layers], plan.layout(index)
        for name, recorded_s, computed_s in (
            ("forward", stage.forward_s, sum(_each_s(costs.forward_s, x, loads[index], layout) for x in layers)),
            ("backward", stage.backward_s, sum(_each_s(costs.backward_s, x, loads[index], layout) for x in layers)),
            ("finish", stage.finish_s, finish_s[index]),
        ):
            if _differs(recorded_s, computed_s):
                message = f"stage {index} records {name} {format_seconds(recorded_s)}, its layers take "
                yield Finding(rule="stage times", message=message + format_seconds(computed_s))


def _at_once(layer: Layer, loads: Loads, layout: Layout) -> tuple[Load, int]:
    """Mean load of the microbatches that a layer runs at once, and their number."""
    count = layout.batch_factor if layer.module in layout.together else 1
    return loads[layer.module].scaled(count), count


def _each_s(price: Callable[[Layer, Load, Layout], float], layer: Layer, loads: Loads, layout: Layout) -> float:
    """Seconds of a layer for each microbatch."""
    load, count = _at_once(layer, loads, layout)
    return price(layer, load, layout) / count


def _held_bytes(plan: Plan, graph: ComputationGraph, stage: int, loads: Loads, alive: int) -> int:
    """What a stage with so many microbatches in flight keeps. Of layers that run k at once those count with which one
    of the `alive` runs: the last one is the first of its k, the one `alive` - 1 before it any."""
    layout, scenario, total = plan.layout(stage), plan.scenario, 0
    for layer in map(graph.layer, plan.stages[stage].layers):
        load, count = _at_once(layer, loads, layout)
        runs = min(plan.microbatches // count, len({place // count for place in range(-alive + 1, 1)}))
        each_bytes = math.ceil(planned_kept_bytes(layer, load, scenario, layout) / count)  # as plans count it
        total += (
            runs * count * (each_bytes + handed_out_bytes(layer, loads, graph, layout, scenario.precision_of(layer)))
        )
    return total


def _stage_memory(plan: Plan, graph: ComputationGraph, loads: Sequence[Loads]) -> Iterator[Finding]:
    """Microbatches in flight, capacity and memory of each stage."""
    if plan.orders:
        yield from _memory_of_orders(plan, graph, loads)
        return
    scenario, depths = plan.scenario, _stage_depths(plan, graph)
    known: dict[tuple[Mesh, Layout], int] = {}
    for index, stage in enumerate(plan.stages):
        alive = plan.microbatches if plan.schedule == "gpipe" else min(plan.microbatches, depths[index])
        if stage.in_flight != alive:
            message = f"stage {index} records {stage.in_flight} microbatches in flight, {plan.schedule} with "
            message += f"{plan.microbatches} microbatches at depth {depths[index]} holds {alive}"
            yield Finding(rule="in flight", message=message)
        layers, layout = [graph.layer(layer) for layer in stage.layers], plan.layout(index)
        usable_bytes, reserved_bytes = _room(plan, index)
        reserved_bytes += _at_work_bytes(plan, graph, loads, (index,), known)
        held_bytes = sum(planned_state_bytes(layer, scenario, layout) for layer in layers)
        kept_bytes = _held_bytes(plan, graph, index, loads[index], alive)
        kept_bytes += waiting_bytes(plan, graph, index, loads[index])
        needed_bytes = reserved_bytes + held_bytes + kept_bytes
        yield from _recorded_memory(plan, index, usable_bytes, needed_bytes, "its layers need")
        if needed_bytes > usable_bytes:
            parts = f"{format_bytes(reserved_bytes)} reserve + {format_bytes(held_bytes)} state"
            kept = f"{format_bytes(kept_bytes)} kept of {alive} microbatches"
            sum_of = f"{parts} + {kept} = {format_bytes(needed_bytes)}"
            message = f"stage {index} needs {sum_of}, a device has {format_bytes(usable_bytes)}"
            yield Finding(rule="memory", message=message)


def _memory_of_orders(plan: Plan, graph: ComputationGraph, loads: Sequence[Loads]) -> Iterator[Finding]:
    """The same where the plan holds its orders: a pipeline rank's stages share its memory."""
    scenario, known = plan.scenario, dict[tuple[Mesh, Layout], int]()
    layers = [[graph.layer(layer) for layer in stage.layers] for stage in plan.stages]
    each_bytes = [
        sum(planned_kept_bytes(layer, loads[stage][layer.module], scenario, plan.layout(stage)) for layer in own)
        for stage, own in enumerate(layers)
    ]
    for row in range(plan.pp):
        stages = plan.stages_of(row)
        usable_bytes, reserved_bytes = _room(plan, stages[0])
        reserved_bytes += _at_work_bytes(plan, graph, loads, stages, known)
        held_bytes = sum(planned_state_bytes(layer, scenario, plan.layout(s)) for s in stages for layer in layers[s])
        alive, peak_bytes = held_microbatches(plan, row, each_bytes)
        needed_bytes = reserved_bytes + held_bytes + peak_bytes
        for stage in stages:
            recorded = plan.stages[stage]
            if recorded.in_flight != alive[stage]:
                message = f"stage {stage} records {recorded.in_flight} microbatches in flight, its order holds "
                yield Finding(rule="in flight", message=message + str(alive[stage]))
            yield from _recorded_memory(plan, stage, usable_bytes, needed_bytes, "its rank needs")
        if needed_bytes > usable_bytes:
            parts = f"{format_bytes(reserved_bytes)} reserve + {format_bytes(held_bytes)} state"
            sum_of = f"{parts} + {format_bytes(peak_bytes)} kept at its peak = {format_bytes(needed_bytes)}"
            message = f"pipeline rank {row} needs {sum_of}, a device has {format_bytes(usable_bytes)}"
            yield Finding(rule="memory", message=message)


def _room(plan: Plan, stage: int) -> tuple[int, int]:
    """(usable, reserved) bytes: the least and the most of the devices of a stage's ranks."""
    cluster, headroom = plan.scenario.cluster, plan.scenario.constraints.memory_headroom
    devices = [cluster.pool_of(rank).device for rank in plan.stage_ranks(stage)]
    usable_bytes = min(int(device.memory_bytes * (1 - headroom)) for device in devices)
    return usable_bytes, max(device.reserved_bytes for device in devices)


def _recorded_memory(plan: Plan, stage: int, usable_bytes: int, needed_bytes: int, needs: str) -> Iterator[Finding]:
    recorded = plan.stages[stage]
    if _differs(recorded.capacity_bytes, usable_bytes):
        message = f"stage {stage} records a capacity of {format_bytes(recorded.capacity_bytes)}, its devices have "
        yield Finding(rule="capacity", message=message + format_bytes(usable_bytes))
    if _differs(recorded.memory_bytes, needed_bytes):
        message = f"stage {stage} records {format_bytes(recorded.memory_bytes)}, {needs} "
        yield Finding(rule="memory number", message=message + format_bytes(needed_bytes))


def _at_work_bytes(
    plan: Plan,
    graph: ComputationGraph,
    mean: Sequence[Loads],
    stages: Sequence[int],
    known: dict[tuple[Mesh, Layout], int],
) -> int:
    """In a microbatch at the 99th percentile: of the layers that have the same mesh what the one at work needs most
    (`known` has it), what losses here need beyond, and what layers here keep beyond a mean microbatch."""
    total = [0]
    for stage in stages:
        layout, loads = plan.layout(stage), peak_loads(plan.scenario, plan.samples(stage))
        several = peak_loads(plan.scenario, plan.samples(stage) * layout.batch_factor)
        loads = {name: several[name] if name in layout.together else load for name, load in loads.items()}
        key = (plan.mesh(stage), layout)
        if key not in known:
            beside = [layer for layer in graph.layers() if layer.module in plan.beside(stage)]
            known[key] = planned_working_bytes(beside, loads, plan.scenario, layout)
        most = known[key]
        total[0] = max(total[0], most)
        layers = [graph.layer(name) for name in plan.stages[stage].layers]
        total += [loss_working_bytes(x, loads[x.module], plan.scenario, layout, most) for x in layers]
        total += [
            planned_excess_bytes(x, _at_once(x, mean[stage], layout)[0], loads[x.module], plan.scenario, layout)
            for x in layers
        ]
    return sum(total)


def _finish_s(plan: Plan, graph: ComputationGraph, costs: CostModel) -> list[float]:
    """Per stage: sum of gradients over the ranks with the same weights, then the update of one rank's parameters."""
    together: dict[Mesh, int] = {}
    for index in range(len(plan.stages)):
        near = _most_in_one_node(plan, index)
        together[plan.mesh(index)] = min(near, together.get(plan.mesh(index), near))
    result_s = []
    for index, stage in enumerate(plan.stages):
        layout = plan.layout(index)
        trained = trained_together([graph.layer(layer) for layer in stage.layers], layout)
        finish_s = costs.reduce_s(trained, layout, together[plan.mesh(index)]) + costs.update_s(trained, layout)
        finish_s += _tied_s(plan, graph, costs, stage.layers, layout)
        result_s.append(finish_s if trained.total else 0.0)
    return result_s


def _tied_s(plan: Plan, graph: ComputationGraph, costs: CostModel, layers: Sequence[str], layout: Layout) -> float:
    """Ranks with these layers and others elsewhere that read the same matrix sum its gradient: two messages of half."""
    near = plan.world <= min(pool.devices_per_node for pool in plan.scenario.cluster.pools)
    width, here, seconds = DTYPE_BYTES[plan.scenario.optimizer.gradient_dtype], set(layers), 0.0
    for table, head in trained_ties(graph):
        if (table in here) != (head in here):
            seconds += 2 * costs.transfer_s(tied_share(graph.layer(head), layout) * width / 2, near)
    return seconds


def _most_in_one_node(plan: Plan, stage: int) -> int:
    """Ranks of a stage with the same weights that share a node, where most of them do."""
    nodes = Counter(plan.scenario.cluster.node_of(rank) for rank in plan.stage_ranks(stage)[:: plan.mesh(stage).tp])
    return max(nodes.values())


def _objective_s(plan: Plan, graph: ComputationGraph, costs: CostModel, loads: Sequence[Loads]) -> float:
    """The closed form of the module's docstring, from recomputed seconds."""
    stage_of = plan.stage_of_layer()
    near = plan.world <= min(pool.devices_per_node for pool in plan.scenario.cluster.pools)
    busy_s, known = [0.0] * plan.pp, dict[tuple[Mesh, Mesh], tuple[int, float]]()
    path_s = [0.0] * plan.pp
    for layer in graph.layers():
        stage = stage_of[layer.id]
        layout = plan.layout(stage)
        load, count = _at_once(layer, loads[stage], layout)
        once_s = costs.forward_s(layer, load, layout) + costs.backward_s(layer, load, layout)
        busy_s[stage] += once_s / count
        path_s[stage] += once_s if plan.pp > 1 else once_s / count
    tail_s = list(path_s)
    for source in reversed(range(plan.pp)):
        for edge in graph.edges():
            target = stage_of[edge.consumer]
            waits = plan.is_ahead(target) or not plan.is_ahead(source)
            if stage_of[edge.producer] == source and target != source and waits:
                lag_s = _lag_s(plan, graph, costs, edge, (source, target), loads, near, known)
                tail_s[source] = max(tail_s[source], path_s[source] + lag_s + tail_s[target])
    return (plan.microbatches - 1) * max(busy_s) + max(tail_s) + max(_finish_s(plan, graph, costs))


def _lag_s(
    plan: Plan,
    graph: ComputationGraph,
    costs: CostModel,
    edge: Edge,
    ends: tuple[int, int],
    loads: Sequence[Loads],
    near: bool,
    known: dict[tuple[Mesh, Mesh], tuple[int, float]],
) -> float:
    """Seconds of a tensor and its gradient between two stages: the busiest rank's messages, one after another; inside a
    mesh with what ranks make whole for it, between two with what the reader's cp ranks join."""
    source, target = (plan.mesh(end) for end in ends)
    ways = 1 + edge.carries_grad
    if source == target:
        layout = plan.layout(ends[0])
        part = loads[ends[0]]
        if {module_of(edge.producer), module_of(edge.consumer)} <= set(layout.together):
            part = {name: load.scaled(layout.batch_factor) for name, load in part.items()}
        size = layout.sent_bytes(edge, graph, part, plan.scenario)
        made_s = costs.make_whole_s(size, layout) if layout.makes_whole(edge, graph) else (0.0, 0.0)
        return costs.transfer_s(size, near) * ways + sum(made_s[:ways])
    parts, border = lcm(source.dp, target.dp), plan.border(edge.name, *ends)
    part, (giving, taking) = mean_loads(plan.scenario, plan.microbatch_size * plan.dp // parts), border.seen
    size = message_bytes(edge, part, plan.scenario.precision_of(edge), giving, taking)
    whole_bytes, seconds = size * max(giving.cp, taking.cp) * parts, 0.0
    if target.cp > 1:
        move_s = costs.place_rows_s if border.way == "placed" else costs.join_rows_s
        seconds = move_s(whole_bytes // target.dp, plan.layout(ends[1])) * ways
    for end, mesh in ((ends[1], target), (ends[0], source))[:ways]:
        if border.way in ("slices", "broadcast") and mesh.tp > 1:
            share_bytes, gathered = whole_bytes // mesh.dp // mesh.cp, border.way == "slices"
            seconds += costs.share_rows_s(share_bytes, plan.layout(end), gathered=gathered)
    for pair in ((giving, taking), (taking, giving))[:ways]:
        count, each = _busiest(pair, known)
        seconds += count * costs.transfer_s(size * each, near)
    return seconds


def _busiest(pair: tuple[Mesh, Mesh], known: dict[tuple[Mesh, Mesh], tuple[int, float]]) -> tuple[int, float]:
    """Most messages that one rank sends or gets, counted over all ranks, and how many of the parts of samples that are
    in one replica of either mesh one has, if that rank has the most of them too."""
    if pair not in known:
        source, target = pair
        counts: Counter[tuple[str, tuple[int, int]]] = Counter()
        parts: Counter[tuple[str, tuple[int, int]]] = Counter()
        for sent, got in messages(*pair):
            a, b = (frozenset(_parts(replica, mesh.dp, pair)) for (replica, _), mesh in ((sent, source), (got, target)))
            counts.update([("sends", sent), ("gets", got)])
            parts.update({("sends", sent): len(a & b), ("gets", got): len(a & b)})
        known[pair] = max(counts.values()), max(parts.values()) / max(counts.values())
    return known[pair]


def _parts(replica: int, dp: int, pair: tuple[Mesh, Mesh]) -> range:
    """Of the smallest parts those in a replica."""
    each = lcm(pair[0].dp, pair[1].dp) // dp
    return range(replica * each, (replica + 1) * each)


def _chunked_s(plan: Plan, graph: ComputationGraph, costs: CostModel, loads: Sequence[Loads]) -> float:
    """The same with several stages per rank."""
    stage_of, count = plan.stage_of_layer(), len(plan.stages)
    near = plan.world <= min(pool.devices_per_node for pool in plan.scenario.cluster.pools)
    busy_s, wait_s = [0.0] * count, [0.0] * count
    for layer in graph.layers():
        stage = stage_of[layer.id]
        load, layout = loads[stage][layer.module], plan.layout(stage)
        busy_s[stage] += costs.forward_s(layer, load, layout) + costs.backward_s(layer, load, layout)
    for edge in graph.edges():
        ends = stage_of[edge.producer], stage_of[edge.consumer]
        for passed in range(*ends):
            wait_s[passed] = max(wait_s[passed], _lag_s(plan, graph, costs, edge, ends, loads, near, {}))
    together, finish_s = min(_most_in_one_node(plan, stage) for stage in range(count)), []
    for row in range(plan.pp):
        held = [layer for stage in plan.stages_of(row) for layer in plan.stages[stage].layers]
        layout = plan.layout(plan.stages_of(row)[0])
        by_stage = [[graph.layer(layer) for layer in plan.stages[stage].layers] for stage in plan.stages_of(row)]
        trained = sum((trained_together(layers, layout) for layers in by_stage), Trained())
        ends_s = costs.reduce_s(trained, layout, together) + costs.update_s(trained, layout)
        ends_s += _tied_s(plan, graph, costs, held, layout)
        finish_s.append(ends_s if trained.total else 0.0)
    repeats = count // plan.pp * plan.microbatches + plan.pp - 1
    return repeats * max(busy_s) + sum(wait_s) + max(finish_s)


def _certificate(plan: Plan, graph: ComputationGraph, costs: CostModel, loads: Sequence[Loads]) -> Iterator[Finding]:
    """Objective, bound and gap."""
    certificate, p = plan.certificate, plan.pp
    if plan.placement and (certificate.status == "given" or plan.chunk_certificate is not None):
        return  # of other ways to lay stages on ranks no closed form is known; it may be another plan's
    if plan.placement and (
        plan.meshes or plan.placement != tuple(s % p for s in range(len(plan.stages))) or len(plan.stages) % p
    ):
        message = f"the plan has {len(plan.stages)} stages on {p} pipeline ranks, not as many on each and in their "
        yield Finding(rule="objective", message=message + "order round them, for which no bound is known")
        return
    objective_s = (_chunked_s if plan.placement else _objective_s)(plan, graph, costs, loads)
    if _differs(certificate.objective_s, objective_s):
        message = f"the plan records a step of {format_seconds(certificate.objective_s)}, the closed form gives "
        yield Finding(rule="objective", message=message + format_seconds(objective_s))
    if certificate.bound_s > certificate.objective_s * (1 + _RELATIVE_TOLERANCE):
        message = f"the lower bound {format_seconds(certificate.bound_s)} is above the plan's own step of "
        yield Finding(rule="bound", message=message + format_seconds(certificate.objective_s))
    if certificate.any_schedule_s > certificate.objective_s * (1 + _RELATIVE_TOLERANCE):
        message = f"the bound of any schedule {format_seconds(certificate.any_schedule_s)} is above the plan's own "
        yield Finding(rule="bound", message=f"{message}step of {format_seconds(certificate.objective_s)}")
    if certificate.status != "given" and certificate.objective_s > 0:
        gap = (certificate.objective_s - certificate.bound_s) / certificate.objective_s
        if abs(gap - certificate.gap) > _RELATIVE_TOLERANCE:
            message = f"the plan records a gap of {certificate.gap:.6f}, objective and bound give {gap:.6f}"
            yield Finding(rule="gap", message=message)
