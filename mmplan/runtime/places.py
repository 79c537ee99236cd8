"""Where ranks stand in a plan, and what each does beside the rank that the program lists for it. Imports no torch.

A program lists one rank of those that share a stage's layers. The others do the same with the ranks beside its peers;
between two meshes a rank sends each part of a tensor to all shards that take it from this one (`planner/mesh.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mmplan.planner.border import Border, seen_shard, shard_of
from mmplan.planner.mesh import Mesh, giver, takers
from mmplan.planner.plan import Plan
from mmplan.planner.program import Action, Program, RankProgram, named_by_layers


@dataclass(frozen=True, slots=True)
class Place:
    """Pipeline rank, replica, and place among the ranks that share the stage's layers."""

    row: int
    replica: int
    shard: int


def place_of(plan: Plan, rank: int) -> Place:
    """Ranks of a stage lie replica by replica (see `Plan.rank`).

    Raises:
        ValueError: the plan gives the rank no work.
    """
    for row in range(plan.pp):
        stage = plan.stages_of(row)[0]
        at, mesh = rank - plan.first_rank(stage), plan.mesh(stage)
        if 0 <= at < mesh.ranks:
            return Place(row, *divmod(at, mesh.width))
    raise ValueError(f"rank {rank} is in no stage of the plan, whose ranks end at {plan.world - 1}")


def mesh_of_row(plan: Plan, row: int) -> Mesh:
    """The mesh of a pipeline rank."""
    return plan.mesh(plan.stages_of(row)[0])


def _groups(plan: Plan) -> list[tuple[int, int]]:
    """First rank and number of those that share layers, of all such groups in the order of their ranks."""
    rows = [(plan.first_rank(plan.stages_of(row)[0]), mesh_of_row(plan, row)) for row in range(plan.pp)]
    return [(first + at * mesh.width, mesh.width) for first, mesh in sorted(rows) for at in range(mesh.dp)]


def widths(plan: Plan) -> tuple[int, ...]:
    """How many ranks share layers, of all such groups in the order of their ranks."""
    return tuple(width for _, width in _groups(plan))


def listed_ranks(plan: Plan) -> tuple[int, ...]:
    """The ranks that a program lists: the first of those that share layers."""
    return tuple(first for first, _ in _groups(plan))


def idle_ranks(plan: Plan) -> tuple[int, ...]:
    """Ranks between those of stages that no stage has: they meet the others, and do nothing."""
    busy = listed_places(plan)
    return tuple(rank for rank in range(plan.world) if rank not in busy)


def idle_program(rank: int) -> RankProgram:
    """Of a rank without a stage: before an update all ranks may have to agree."""
    return RankProgram(rank=rank, stage=0, replica=0, actions=(Action("STEP", 0),))


def listed_places(plan: Plan) -> dict[int, int]:
    """Of every rank with a stage the place, among all that a program lists, of the one that stands for it."""
    return {first + shard: place for place, (first, width) in enumerate(_groups(plan)) for shard in range(width)}


def one_process_each(plan: Plan) -> Plan:
    """The plan of a rehearsal, where one process stands for all that share a stage's layers, in the same order."""
    first, meshes = plan.dp * sum(not mesh_of_row(plan, row).modules for row in range(plan.pp)), list[Mesh]()
    for mesh in sorted(plan.meshes, key=lambda one: one.first_rank):
        meshes.append(replace(mesh, tp=1, cp=1, first_rank=first))
        first += mesh.dp * sum(mesh_of_row(plan, row) == mesh for row in range(plan.pp))
    return replace(plan, tp=1, cp=1, meshes=tuple(meshes))


def program_of_shard(plan: Plan, program: RankProgram, shard: int) -> RankProgram:
    """The program of the rank that is `shard` places behind the listed one."""
    if not plan.meshes:
        if shard == 0:
            return program
        actions = [a if a.peer < 0 else replace(a, peer=a.peer + shard) for a in program.actions]
    else:
        actions = _between_meshes(plan, program, shard)
    sent = {action.tensor for action in actions if action.kind == "SEND"}
    unsent = frozenset(a.tensor for a in program.actions if a.kind == "SEND" and a.tensor not in sent)
    return replace(program, rank=program.rank + shard, actions=tuple(actions), unsent=unsent)


def _between_meshes(plan: Plan, program: RankProgram, shard: int) -> list[Action]:
    """Its own messages: each part, or slices of it, to every shard that takes it from here; from every shard that has
    some of it."""
    stage_of, made = plan.stage_of_layer(), list[Action]()
    offsets: dict[tuple[str, int], int] = {}  # of the next part of a tensor, in bytes
    for action in program.actions:
        if action.kind not in ("SEND", "RECV"):
            made.append(action)
            continue
        border, gradient = _border(plan, action, stage_of), "<" in action.tensor
        is_source = (action.kind == "SEND") != gradient
        meshes, seen = (border.source, border.target), border.seen
        own, other = (seen if is_source else seen[::-1]) if border.source != border.target else (seen[0], seen[0])
        at = seen_shard(shard, meshes[not is_source], border.way)
        if at is None:
            continue
        beyond, key = meshes[is_source], (action.tensor, action.microbatch)
        if action.kind == "RECV":
            peers = [(one, 0) for one in ((at,) if own == other else giver(at, other, own))]
        else:
            held = 1 if own == other else max(1, other.cp // own.cp)  # slices of a part
            begin = offsets.get(key, 0)
            peers = [(one, begin + one // other.tp % held * action.bytes) for one in takers(at, own, other)]
            offsets[key] = begin + held * action.bytes
        made += [
            replace(action, peer=action.peer + shard_of(one, beyond, border.way), copies=1, offset=offset)
            for one, offset in peers
        ]
    return [replace(a, whole_bytes=offsets[a.tensor, a.microbatch]) if a.kind == "SEND" else a for a in made]


def _border(plan: Plan, action: Action, stage_of: Mapping[str, int]) -> Border:
    """Of the stage that makes an activation and that which reads it; `action` is a transfer."""
    producer, consumer = named_by_layers(action.tensor).replace("<", ">").split(">")
    return plan.border(action.tensor, stage_of[producer], stage_of[consumer])


def once_each(program: Program) -> Program:
    """What a rehearsal sends of a program: to one process for all shards one message."""
    ranks = (replace(rank, actions=tuple(replace(a, copies=1) for a in rank.actions)) for rank in program.ranks)
    return replace(program, ranks=tuple(ranks))


def collapsed(program: RankProgram, places: Mapping[int, int]) -> RankProgram:
    """The program with ranks and peers by their `places` among the listed ones."""
    actions = tuple(a if a.peer < 0 else replace(a, peer=places[a.peer]) for a in program.actions)
    return replace(program, rank=places[program.rank], actions=actions)
