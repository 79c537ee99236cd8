"""What a run of a user's own model notes before its first step, beside what stays whole on ranks that share layers."""

from collections.abc import Iterable

from mmplan.planner.mesh import Mesh
from mmplan.planner.plan import Plan, module_of
from mmplan.planner.step_loads import part_size
from mmplan.runtime.ghost.laying import Laid, dealt_pieces
from mmplan.runtime.ghost.model import saved_buffers
from mmplan.runtime.ghost.own_buffers import told_own_buffers
from mmplan.scenario.document import counted


def told_parts(plan: Plan) -> tuple[str, ...]:
    """A sentence on each mesh that has fewer replicas than a microbatch has parts."""
    return tuple(
        f"a replica of {' and '.join(mesh.modules) or 'all other modules'} runs a microbatch as "
        f"{plan.parts // mesh.dp} batches of {counted(part_size(plan), 'sample')}, because replicas elsewhere have "
        "parts of it"
        for mesh in (plan.base, *plan.meshes)
        if mesh.dp < plan.parts
    )


def own_buffers(plan: Plan, laid: Laid, mesh: Mesh) -> tuple[str, ...]:
    """A sentence on buffers of a mesh's modules that forwards change where ranks compute of other samples, rows or
    images, if any are."""
    dealt = dealt_pieces(plan, laid)
    apart = {piece: one for one in plan.meshes for piece in pieces_on(laid, one)}

    def around(buffer: str, units: Iterable[str]) -> str:
        return next((unit for unit in units if buffer.startswith(f"{unit}.")), "")

    def unlike(buffer: str) -> bool:
        return bool(mesh.dp > 1 or around(buffer, laid.recorder.cut) or around(buffer, dealt))

    changed = [name for name in saved_buffers(laid.model) if name in laid.recorder.changed and unlike(name)]
    own = [name for name in changed if apart.get(around(name, apart), plan.base) == mesh]
    widths = {"dp": mesh.dp, "cp": mesh.cp, "tp": mesh.tp if dealt else 1}
    told = " x ".join(f"{axis}={width}" for axis, width in widths.items() if width > 1)
    return told_own_buffers(laid.model, own, f"the ranks of {told}")


def pieces_on(laid: Laid, mesh: Mesh) -> frozenset[str]:
    """Of the modules of a mesh of their own."""
    return frozenset(piece for piece, layer in laid.owners.layer_of.items() if module_of(layer) in mesh.modules)
