"""Can modules with ranks of their own work beside the others? Every rank once, whole samples, tp inside a node."""

from collections.abc import Iterator
from itertools import pairwise

from mmplan.cost_models.degrees import divides, sharded_widths
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.patches import patch_modules, read_by
from mmplan.planner.finding import Finding
from mmplan.planner.mesh import Mesh, nested
from mmplan.planner.mesh_choices import experts_of
from mmplan.planner.plan import LARGEST_NUMBER, Plan, module_of


def check_meshes(plan: Plan, graph: ComputationGraph) -> Iterator[Finding]:
    """Everything about the meshes that can be said before layers are looked at."""
    if not plan.meshes:
        return
    for index, mesh in enumerate(plan.meshes):
        least = min(
            mesh.tp, mesh.cp, mesh.ep, mesh.dp, mesh.first_rank + 1, plan.tp, plan.cp, plan.dp, plan.microbatch_size
        )
        if not mesh.modules or least < 1 or max(mesh.tp, mesh.cp, mesh.ep, mesh.dp, mesh.first_rank) >= LARGEST_NUMBER:
            message = f"mesh {index} of {', '.join(mesh.modules) or 'no module'} has {mesh} from rank {mesh.first_rank}"
            yield Finding(rule="meshes", message=f"{message}: degrees start at 1, ranks at 0")
            return
    findings = [*_modules(plan), *_of_stages(plan)]
    yield from findings
    if not findings:
        yield from _ways(plan, graph)
        yield from _samples(plan)
        yield from _shards(plan)
        yield from _ranks(plan)


def _modules(plan: Plan) -> Iterator[Finding]:
    """Modules in front of language models, each in one mesh at most."""
    known = {module.name: module for module in plan.scenario.model.modules}
    seen: set[str] = set()
    for mesh in plan.meshes:
        for name in mesh.modules:
            if name not in known or known[name].kind == "language_model":
                what = "is no module of this model" if name not in known else "is a language model"
                message = f"{name} {what}: encoders and projectors can have a mesh of their own, the rest of a plan "
                yield Finding(rule="meshes", message=message + "runs on tp, cp and dp of the plan")
            if name in seen:
                yield Finding(rule="meshes", message=f"{name} has two meshes")
            if name in plan.spread:
                yield Finding(rule="meshes", message=f"{name} has a mesh of its own and is spread over that of others")
            seen.add(name)
        yield from _context(plan, mesh)
        yield from _experts(plan, mesh)


def _context(plan: Plan, mesh: Mesh) -> Iterator[Finding]:
    """cp of a mesh leaves modules whole, and cuts rows of those that can."""
    names = ", ".join(mesh.modules)
    if mesh.cp > 1 and mesh.tp > 1:
        message = f"{mesh} in the mesh of {names}: with cp each rank has whole layers, so that tp is 1"
        yield Finding(rule="meshes", message=message)
    able = set(patch_modules(plan.scenario.model)) & set(mesh.modules)
    for name in mesh.patches:
        if name not in able or mesh.cp == 1:
            why = "is no module of the mesh that can be" if name not in able else "its mesh has cp=1"
            yield Finding(rule="meshes", message=f"{name} is cut along patches, and {why}")
        elif (source := read_by(plan.scenario.model, name)) and source not in mesh.patches:
            yield Finding(rule="meshes", message=f"{name} is cut along patches, and {source}, which it reads, is not")


def _experts(plan: Plan, mesh: Mesh) -> Iterator[Finding]:
    """ep of a mesh divides its experts and the ranks of a stage, and leaves modules in columns."""
    if mesh.ep == 1:
        return
    names, count = ", ".join(mesh.modules), experts_of(plan.scenario, [n for n in mesh.modules if _knows(plan, n)])
    if count % mesh.ep:
        message = (
            f"ep={mesh.ep} in the mesh of {names}, which has {count} experts"
            if count > 1
            else (f"ep={mesh.ep} in the mesh of {names}, which has no experts")
        )
        yield Finding(rule="meshes", message=message)
    elif mesh.cp > 1 or mesh.ranks % mesh.ep:
        message = f"{mesh} in the mesh of {names}: ep has to divide the {mesh.ranks} ranks of a stage, and cp to be 1"
        yield Finding(rule="meshes", message=message)


def _knows(plan: Plan, name: str) -> bool:
    return any(module.name == name for module in plan.scenario.model.modules)


def _of_stages(plan: Plan) -> Iterator[Finding]:
    """A stage lies in one mesh, and no mesh is without stages."""
    mesh_of = {name: mesh for mesh in plan.meshes for name in mesh.modules}
    found: set[Mesh | None] = set()
    by_row: dict[int, Mesh | None] = {}
    for index, stage in enumerate(plan.stages):
        modules = {module_of(layer) for layer in stage.layers}
        meshes = {mesh_of.get(module) for module in modules}
        if len(meshes) > 1:
            apart = " and ".join(sorted(modules))
            yield Finding(rule="meshes", message=f"stage {index} holds {apart}, which have unlike meshes")
        found |= meshes
        if meshes and by_row.setdefault(plan.row(index), min(meshes, key=str)) not in meshes:
            message = f"pipeline rank {plan.row(index)} holds stages of unlike meshes"
            yield Finding(rule="meshes", message=message)
    for mesh in plan.meshes:
        if mesh not in found:
            yield Finding(rule="meshes", message=f"no stage holds {', '.join(mesh.modules)}, which have a mesh")


def _ways(plan: Plan, graph: ComputationGraph) -> Iterator[Finding]:
    """Of tensors between unlike meshes, and possible between these."""
    edges = {(edge.producer, module_of(edge.consumer)): edge for edge in graph.edges()}
    mesh_of = {name: mesh for mesh in plan.meshes for name in mesh.modules}
    for one in plan.ways:
        name = f"{one.producer} crosses to {one.reader} as {one.way}"
        source, target = (mesh_of.get(end, plan.base) for end in (module_of(one.producer), one.reader))
        if (one.producer, one.reader) not in edges:
            yield Finding(rule="meshes", message=f"{name}, and {one.reader} reads no such layer")
        elif source == target:
            yield Finding(rule="meshes", message=f"{name}, and both are on one mesh")
        elif one.way == "placed" and (target.cp == 1 or not edges[one.producer, one.reader].placed):
            why = "on one rank" if target.cp == 1 else "not at places of its sequence"
            yield Finding(rule="meshes", message=f"{name}, and {one.reader} reads it {why}")
        elif one.way == "slices" and not nested((source.width, target.width)):
            widths = f"replicas of {source.width} and {target.width} ranks"
            message = f"{name} between {widths}: of two widths one has to divide the other"
            yield Finding(rule="meshes", message=message)


def _samples(plan: Plan) -> Iterator[Finding]:
    """cp ranks are nested, and replicas hold whole samples."""
    cps = [plan.cp, *(mesh.cp for mesh in plan.meshes)]
    if not nested(cps):
        message = f"the meshes have cp of {', '.join(map(str, sorted(set(cps))))}: of two one has to divide the other, "
        yield Finding(rule="meshes", message=message + "so that ranks hand on whole slices of rows")
        return
    together = plan.microbatch_size * plan.dp
    for mesh in plan.meshes:
        if together % mesh.dp:
            share = f"dp={plan.dp} x {plan.microbatch_size} samples / dp={mesh.dp} = {together / mesh.dp:g}"
            message = f"a replica of {', '.join(mesh.modules)} would get {share} samples of a microbatch"
            yield Finding(rule="meshes", message=f"{message}, no whole number")


def _shards(plan: Plan) -> Iterator[Finding]:
    """tp divides the widths of its modules."""
    for mesh in plan.meshes:
        for name in mesh.modules:
            module = plan.scenario.model.module(name)
            if not divides(module, mesh.tp):
                sizes = sharded_widths(module).items()
                odd = [f"{what} {size} / {mesh.tp} = {size / mesh.tp:g}" for what, size in sizes if size % mesh.tp]
                why = f": {odd[0]} is no whole number" if odd else ": a zone forbids to split it"
                yield Finding(rule="meshes", message=f"tp={mesh.tp} does not divide {name}{why}")


def _ranks(plan: Plan) -> Iterator[Finding]:
    """Every rank in one stage at most, on the cluster, tensor-parallel groups inside nodes."""
    cluster = plan.scenario.cluster
    spans: dict[int, tuple[int, int]] = {}
    for stage in range(len(plan.stages)):
        mesh, first = plan.mesh(stage), plan.first_rank(stage)
        if mesh.ranks < 1:
            return  # said by the degrees
        end = first + mesh.ranks
        spans[plan.row(stage)] = (first, end)
        if end > cluster.device_count:
            have = f"cluster {cluster.name} has {cluster.device_count}"
            message = f"stage {stage} ({mesh}) would have ranks {first} to {end - 1}, {have} devices"
            yield Finding(rule="meshes", message=message)
            return
    ordered = sorted((first, end, row) for row, (first, end) in spans.items())
    for (first, end, row), (later, _, other) in pairwise(ordered):
        if later < end:
            message = f"rank {later} is in pipeline ranks {row} (ranks {first} to {end - 1}) and {other}"
            yield Finding(rule="meshes", message=message)
    for row, (first, end) in spans.items():
        tp = plan.mesh(plan.stages_of(row)[0]).tp
        for start in range(first, end, tp):
            if cluster.node_of(start) != cluster.node_of(start + tp - 1):
                nodes = f"nodes {cluster.node_of(start)} and {cluster.node_of(start + tp - 1)}"
                message = f"tp={tp} puts ranks {start} to {start + tp - 1} of one group on {nodes}"
                yield Finding(rule="meshes", message=message)
                break
