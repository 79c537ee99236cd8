"""Is a plan sound, and are its numbers true? Shares no code with the solvers, the schedules or the lowering.

Everything is computed again from the scenario inside the plan: the layer graph, loads, seconds, bytes. The plan's
program is made by `lower` like any caller would and judged by `check_program`.
"""

from collections.abc import Iterator, Mapping

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.degrees import divides, tp_degrees
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layout import base_of
from mmplan.cost_models.patches import patch_modules, read_by
from mmplan.errors import CheckError
from mmplan.planner.check_ahead import check_ahead
from mmplan.planner.check_chunks import check_chunk_certificate
from mmplan.planner.check_meshes import check_meshes
from mmplan.planner.check_numbers import check_numbers
from mmplan.planner.check_program import check_program
from mmplan.planner.check_schedule import check_orders, check_placement, check_schedule_certificate
from mmplan.planner.check_together import check_together, sent_with
from mmplan.planner.finding import Finding
from mmplan.planner.lower import lower
from mmplan.planner.mesh import partners
from mmplan.planner.plan import Plan, scenario_hash
from mmplan.planner.program import Program
from mmplan.planner.second_process import both
from mmplan.planner.step_loads import mean_step_loads

LARGE_FORWARDS = 5_000  # stages x microbatches from which on two processes check: half a second


def check_plan(plan: Plan) -> tuple[Finding, ...]:
    """Everything wrong with the plan and its program; empty when it is sound."""
    findings = check_structure(plan) or check_structure(plan.one_chunk)
    if findings:
        return findings
    graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
    program = lower(plan, graph, mean_step_loads(plan))

    def beside() -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
        numbers = (*check_numbers(plan, graph, costs), *check_chunk_certificate(plan, graph, costs))
        return (*numbers, *check_schedule_certificate(plan)), check_tensors(plan, graph, program)

    large = len(plan.stages) * plan.microbatches >= LARGE_FORWARDS
    of_program, (of_numbers, of_tensors) = both(lambda: check_program(program), beside, worth=large)
    return (*of_numbers, *of_program, *of_tensors)


def require_structure(plan: Plan) -> None:
    """What a plan needs to be played at all: a scenario as it was planned, whole stages, degrees that fit. It may break
    the scenario's wishes, no-split zones and constraints.

    Raises:
        CheckError: the first finding, and how many more there are.
    """
    findings = [finding for finding in check_structure(plan) if finding.rule not in ("constraints", "no-split zone")]
    if findings:
        more = f" (and {len(findings) - 1} more, see mmplan check)" if len(findings) > 1 else ""
        raise CheckError(f"the plan is not sound: {findings[0].message}{more}")


def check_structure(plan: Plan) -> tuple[Finding, ...]:
    """Layers, stages, degrees and batch; no costs. A scenario that was changed is reported and not read further."""
    changed = tuple(_hash(plan))
    if changed:
        return changed
    graph = build_graph(plan.scenario)
    for rule in (check_placement, check_meshes):
        if placed := tuple(rule(plan, graph)):
            return placed
    rules = (_layers, _degrees, _tensor_parallel, _experts, _batch, check_together, check_ahead, _allowed, check_orders)
    findings = [finding for rule in rules for finding in rule(plan, graph)]
    if not any(finding.rule == "layers" for finding in findings):
        findings += [finding for rule in (_stage_order, _zones) for finding in rule(plan, graph)]
    return tuple(findings)


def _hash(plan: Plan) -> Iterator[Finding]:
    expected = scenario_hash(plan.scenario)
    if plan.scenario_hash != expected:
        message = f"the plan says its scenario has hash {plan.scenario_hash}, the scenario in it has {expected}"
        message += ": change the scenario's file and optimize again"
        yield Finding(rule="scenario hash", message=message)


def _layers(plan: Plan, graph: ComputationGraph) -> Iterator[Finding]:
    """Each layer of the graph in exactly one stage, and nothing else in any stage."""
    found: dict[str, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        if not stage.layers:
            yield Finding(rule="layers", message=f"stage {index} holds no layer")
        for name in stage.layers:
            found.setdefault(name, []).append(index)
    known = {layer.id for layer in graph.layers()}
    for layer in graph.layers():
        if layer.id not in found:
            yield Finding(rule="layers", message=f"layer {layer.id} is in no stage")
    for name, stages in found.items():
        if name not in known:
            message = f"stage {stages[0]} holds {name}, which model {plan.scenario.model.name} does not have"
            yield Finding(rule="layers", message=message)
        elif len(stages) > 1:
            where = " and ".join(str(stage) for stage in stages)
            yield Finding(rule="layers", message=f"layer {name} is listed {len(stages)} times, in stages {where}")


def _degrees(plan: Plan, graph: ComputationGraph) -> Iterator[Finding]:
    """Positive degrees that fit the cluster."""
    if min(plan.pp, plan.dp, plan.tp, plan.cp, plan.ep, plan.etp, plan.microbatch_size, plan.microbatches) < 1:
        message = (
            f"pp={plan.pp}, dp={plan.dp}, tp={plan.tp}, cp={plan.cp}, ep={plan.ep}, etp={plan.etp}, microbatch size "
            f"{plan.microbatch_size} and {plan.microbatches} microbatches must all be positive"
        )
        yield Finding(rule="degrees", message=message)
        return
    devices = plan.scenario.cluster.device_count
    if not plan.meshes and plan.rank_count > devices:
        cp = f" x cp={plan.cp}" if plan.cp > 1 else ""
        product = f"pp={plan.pp} x dp={plan.dp}{cp} x tp={plan.tp} = {plan.rank_count}"
        yield Finding(rule="degrees", message=f"{product} devices, cluster {plan.scenario.cluster.name} has {devices}")


def _experts(plan: Plan, graph: ComputationGraph) -> Iterator[Finding]:
    """Experts are spread evenly, and whole sets of them tile the ranks of a stage."""
    if plan.ep <= 1 or min(plan.etp, plan.dp, plan.width) < 1:
        return
    shapes = [module.transformer for module in plan.scenario.model.modules if module.transformer is not None]
    counts = sorted({shape.moe.experts for shape in shapes if shape.moe is not None})
    if not counts:
        yield Finding(rule="experts", message=f"ep={plan.ep}, and the model has no experts")
    for count in counts:
        if count % plan.ep:
            message = f"{count} experts / ep={plan.ep} = {count / plan.ep:g} is no whole number"
            yield Finding(rule="experts", message=message)
    ranks, side = plan.width * plan.dp, plan.ep * plan.etp
    if ranks % side:
        message = f"ep={plan.ep} x etp={plan.etp} = {side} does not divide the {ranks} ranks of a stage"
        yield Finding(rule="experts", message=message)
    if plan.etp not in (1, plan.tp):
        yield Finding(rule="experts", message=f"etp={plan.etp} is neither 1 nor tp={plan.tp}")


def _tensor_parallel(plan: Plan, graph: ComputationGraph) -> Iterator[Finding]:
    """tp divides the model's widths, and its group lies inside one node."""
    if plan.tp < 1:
        return  # said by the degrees
    possible = tp_degrees(plan.scenario)
    if plan.tp not in possible:
        names = ", ".join(str(degree) for degree in possible)
        message = f"tp={plan.tp} does not divide the heads, widths and nodes of this scenario; possible: {names}"
        yield Finding(rule="tensor parallel", message=message)
    model = plan.scenario.model
    apart = {*plan.spread, *(name for mesh in plan.meshes for name in mesh.modules)}
    for module in model.modules:
        if module.name not in apart and module.kind != "language_model" and not divides(module, plan.tp):
            message = f"tp={plan.tp} does not divide the widths of {module.name}, which is not spread"
            yield Finding(rule="tensor parallel", message=message)
    for name in plan.patches:
        if name not in plan.spread or name not in patch_modules(model):
            yield Finding(rule="tensor parallel", message=f"{name} is cut along patches, and is no module that can be")
        elif (source := read_by(model, name)) and source not in plan.patches:
            message = f"{name} is cut along patches, and {source}, which it reads, is not"
            yield Finding(rule="tensor parallel", message=message)
    for name in plan.spread:
        if name not in [module.name for module in model.modules if module.kind != "language_model"]:
            yield Finding(rule="tensor parallel", message=f"{name} is spread, and is no module that can be")
    cluster = plan.scenario.cluster
    if plan.meshes or all(pool.devices_per_node % plan.tp == 0 for pool in cluster.pools):
        return  # said by the meshes, or groups start at multiples of tp and so do nodes
    for first in range(0, min(plan.rank_count, cluster.device_count), plan.tp):
        last = min(first + plan.tp, cluster.device_count) - 1
        if cluster.node_of(first) != cluster.node_of(last):
            nodes = f"nodes {cluster.node_of(first)} and {cluster.node_of(last)}"
            message = f"tp={plan.tp} puts ranks {first} to {last} of one group on {nodes}"
            yield Finding(rule="tensor parallel", message=message)
            break


def _batch(plan: Plan, graph: ComputationGraph) -> Iterator[Finding]:
    samples = plan.dp * plan.microbatch_size * plan.microbatches
    if samples != plan.scenario.global_batch:
        product = f"dp={plan.dp} x {plan.microbatch_size} samples x {plan.microbatches} microbatches = {samples}"
        yield Finding(rule="batch", message=f"{product}, the global batch is {plan.scenario.global_batch}")


def _allowed(plan: Plan, graph: ComputationGraph) -> Iterator[Finding]:
    """What the scenario's constraints allow."""
    constraints = plan.scenario.constraints
    kept = constraints.offload == ("none",)  # then the technique says what is offloaded
    limits: tuple[tuple[str, object, tuple[object, ...]], ...] = (
        ("tp", plan.tp, constraints.tp),
        ("pp", plan.pp, constraints.pp),
        ("dp", plan.dp, constraints.dp),
        ("microbatch", plan.microbatch_size, constraints.microbatch),
        ("schedule", plan.schedule, constraints.schedule),
        ("cp", plan.cp, constraints.cp),
        ("ep", plan.ep, constraints.ep),
        ("etp", plan.ranks_per_expert, constraints.etp),
        ("vp", plan.vp, constraints.vp),
        ("offload", plan.scenario.technique.offload, () if kept else constraints.offload),
        ("fp8", plan.scenario.technique.fp8, () if constraints.fp8 == ("none",) else constraints.fp8),
        ("sequence_parallel", plan.scenario.technique.sequence_parallel, constraints.sequence_parallel),
        ("compression", plan.scenario.technique.compression, tuple(dict.fromkeys(("none", *constraints.compression)))),
        ("sharding", plan.sharding, constraints.sharding),
        *(("recompute", base_of(stage.recompute), constraints.recompute) for stage in plan.stages),
    )
    wanted = constraints.encode_together
    for name, factors in wanted or ():
        factor = plan.batch_factor if name in plan.together else 1
        if factors and factor not in factors:
            names = ", ".join(map(str, factors))
            message = f"{name} has batch factor {factor}, constraints.encode_together allows {names}"
            yield Finding(rule="constraints", message=message)
    for name, value, allowed in limits:
        if allowed and value not in allowed:
            names, found = ", ".join(map(_written, allowed)), _written(value)
            yield Finding(rule="constraints", message=f"{name} is {found}, constraints.{name} allows {names}")


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _stage_order(plan: Plan, graph: ComputationGraph) -> Iterator[Finding]:
    """Layers inside a stage and stages among each other follow the direction of the edges."""
    place = {
        layer: (index, position)
        for index, stage in enumerate(plan.stages)
        for position, layer in enumerate(stage.layers)
    }
    links: dict[int, dict[int, str]] = {index: {} for index in range(len(plan.stages))}
    for edge in graph.edges():
        (source, early), (target, late) = place[edge.producer], place[edge.consumer]
        if source == target and early > late:
            message = f"stage {source} lists {edge.consumer} before {edge.producer}, which feeds it"
            yield Finding(rule="stage order", message=message)
        elif source != target:
            links[source].setdefault(target, edge.name)
    cycle = _stage_cycle(links)
    if cycle:
        steps = ", ".join(f"{a} feeds {b} ({links[a][b]})" for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True))
        yield Finding(rule="stage order", message=f"stages wait for each other in a circle: {steps}")
        return
    for source, targets in links.items():
        for target, name in targets.items():
            if target < source:
                message = f"stage {source} feeds the earlier stage {target} ({name}): number them along the edges"
                yield Finding(rule="stage order", message=message)


def _stage_cycle(links: dict[int, dict[int, str]]) -> list[int]:
    """Stages of one cycle, or nothing: drop stages that nobody left feeds, then walk back among the rest."""
    left = set(links)
    while True:
        fed = {target for source in left for target in links[source] if target in left}
        if fed == left:
            break
        left = fed
    if not left:
        return []
    path = [min(left)]
    while True:
        feeder = min(source for source in left if path[-1] in links[source])
        if feeder in path:
            return list(reversed(path[path.index(feeder) :]))
        path.append(feeder)


def _zones(plan: Plan, graph: ComputationGraph) -> Iterator[Finding]:
    """No cut touches a no-split layer or crosses an edge that cannot be cut."""
    stage_of = plan.stage_of_layer()
    zone = set(plan.scenario.constraints.no_split)
    for edge in graph.edges():
        source, target = stage_of[edge.producer], stage_of[edge.consumer]
        if source == target:
            continue
        where = f"between stage {source} and stage {target}"
        if not edge.cuttable:
            yield Finding(rule="uncuttable edge", message=f"edge {edge.name} is cut {where} and cannot be")
        for layer in sorted({edge.producer, edge.consumer} & zone):
            message = f"edge {edge.name} is cut {where}, constraints.no_split names {layer}"
            yield Finding(rule="no-split zone", message=message)


def check_tensors(plan: Plan, graph: ComputationGraph, program: Program) -> tuple[Finding, ...]:
    """Every stage gets each tensor it reads, and each gradient that flows back, once per microbatch: from the replica
    that has its samples, or a part from each that has some."""
    stage_of = plan.stage_of_layer()
    activations: set[tuple[int, int, str]] = set()  # source stage, target stage, producing layer
    gradients: set[tuple[int, int, str]] = set()
    for edge in graph.edges():
        source, target = stage_of[edge.producer], stage_of[edge.consumer]
        if source != target:
            activations.add((source, target, edge.producer))
            if edge.carries_grad:
                gradients.add((target, source, edge.producer))
    findings = []
    for rank in program.ranks:
        expected = sorted(
            (source, layer, mark, microbatch, target, plan.rank(source, partner))
            for mark, needs in ((">", activations), ("<", gradients))
            for source, target, layer in needs
            if plan.row(target) == plan.row(rank.stage) != plan.row(source)
            for partner in partners(rank.replica, plan.mesh(target), plan.mesh(source))
            for microbatch in sent_with(plan, graph, layer, mark, reader=target if mark == ">" else source)
        )
        received = [action for action in rank.actions if action.kind == "RECV"]
        got = sorted((*_named(a.tensor, stage_of), a.microbatch, a.stage, a.peer) for a in received)
        lost = sorted(set(expected) - set(got)) or sorted(set(got) - set(expected))
        if lost or len(got) != len(set(got)):
            source, layer, mark, microbatch, target, _ = lost[0] if lost else got[0]
            what = "output" if mark == ">" else "gradient of the output"
            verb = "does not receive" if set(expected) - set(got) else "receives without need or twice"
            message = f"rank {rank.rank} (stage {target}) {verb} the {what} of {layer} from stage {source}"
            findings.append(Finding(rule="tensors", message=f"{message}, microbatch {microbatch}"))
    return tuple(findings)


def _named(tensor: str, stage_of: Mapping[str, int]) -> tuple[int, str, str]:
    """Sending stage, producing layer and direction mark of a tensor's name."""
    mark = ">" if ">" in tensor else "<"
    producer, consumer = tensor.split(mark)
    return stage_of[producer if mark == ">" else consumer], producer, mark
