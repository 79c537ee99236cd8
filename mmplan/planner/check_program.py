"""Is a program complete and free of deadlock? Knows nothing of how programs are made.

A program is safe even with zero buffers, where a send waits for its receive, iff the graph of rank orders is acyclic
after both ends of each transfer, and all replicas of each reduction, are merged into one node. Libraries that match
messages by order (NCCL) also need one common order of all transfers between two ranks.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from mmplan.planner.finding import Finding
from mmplan.planner.program import Action, Program, RankProgram, is_ahead

_Node = tuple[object, ...]
_Transfer = tuple[str, int, int, int, int]  # tensor, microbatch, bytes, from, to
_Before = dict[_Node, list[tuple[_Node, tuple[int, Action, Action]]]]  # node -> what it waits for, and why


def check_program(program: Program) -> tuple[Finding, ...]:
    """Everything wrong with the program; empty when it is sound."""
    findings = [finding for rank in program.ranks for finding in _computes(rank, program.microbatches)]
    findings += [finding for rank in program.ranks for finding in _transfers_around_computes(rank)]
    findings += _both_ends(program)
    findings += _reductions(program)
    findings += _ties(program)
    if not findings:
        findings += circles(program)
    return tuple(findings)


def _computes(rank: RankProgram, microbatches: int) -> Iterator[Finding]:
    """Of each stage each microbatch forward once; backward once for all or for none, whole (B) or in parts (I, and W
    for all of these or for none); forward first."""
    seen: Counter[tuple[int, str, int]] = Counter(
        (action.stage, action.kind, action.microbatch) for action in rank.actions if action.kind in "FBIW"
    )
    stages = {rank.stage} | {stage for stage, kind, _ in seen if kind == "F"}
    whole = {(stage, microbatch) for stage, kind, microbatch in seen if kind == "B"}
    listed = {(stage, "F") for stage in stages} | {(s, kind) for s, kind, _ in seen if s in stages}
    for stage, kind in sorted(listed):
        for microbatch in range(microbatches):
            count = seen.pop((stage, kind, microbatch), 0)
            if kind == "B" and count == 0 and seen[stage, "I", microbatch]:
                continue  # in parts
            if kind in "IW" and count == 0 and (stage, microbatch) in whole:
                continue
            if count != 1:
                name = f"{stage}{kind}{microbatch}"
                yield Finding(
                    rule="completeness", message=f"rank {rank.rank} runs {name} {count} times instead of once"
                )
            elif kind in "IW" and (stage, microbatch) in whole:
                message = f"rank {rank.rank} runs {stage}{kind}{microbatch} beside the whole {stage}B{microbatch}"
                yield Finding(rule="completeness", message=message)
    for stage, kind, microbatch in seen:
        if stage in stages:
            message = f"rank {rank.rank} runs {stage}{kind}{microbatch}, the step has {microbatches} microbatches"
            yield Finding(rule="completeness", message=message)
    first: dict[tuple[int, str, int], int] = {
        (a.stage, a.kind, a.microbatch): position for position, a in reversed(list(enumerate(rank.actions)))
    }
    for stage in sorted(stages):
        for early, late in (("F", "B"), ("F", "I"), ("I", "W")):
            for microbatch in range(microbatches):
                after = first.get((stage, late, microbatch), len(rank.actions))
                if after < first.get((stage, early, microbatch), -1):
                    names = f"{stage}{late}{microbatch} before {stage}{early}{microbatch}"
                    yield Finding(rule="order", message=f"rank {rank.rank} runs {names}")
    for action in rank.actions:
        if action.stage not in stages:
            held = f"stage {rank.stage}" if len(stages) == 1 else f"stages {', '.join(map(str, sorted(stages)))}"
            yield Finding(rule="order", message=f"rank {rank.rank} holds {held} and lists {action}")


def _transfers_around_computes(rank: RankProgram) -> Iterator[Finding]:
    """A tensor is sent after the compute that makes it and received before the one that reads it."""
    place: dict[tuple[int, str, int], int] = {}
    for position, action in enumerate(rank.actions):
        if action.kind in "FBI":
            place.setdefault((action.stage, "F" if action.kind == "F" else "B", action.microbatch), position)
    for position, action in enumerate(rank.actions):
        if action.kind not in ("SEND", "RECV"):
            continue
        half = "B" if "<" in action.tensor else "F"
        compute = place.get((action.stage, half, action.microbatch))
        name = f"{action.stage}{half}{action.microbatch}"
        if compute is None:
            yield Finding(rule="transfer", message=f"rank {rank.rank} lists {action} and never runs {name}")
        elif action.kind == "SEND" and position < compute:
            yield Finding(rule="transfer", message=f"rank {rank.rank} lists {action} before {name} has made the tensor")
        elif action.kind == "RECV" and is_ahead(action.tensor):
            if position < compute:
                message = f"rank {rank.rank} lists {action} of the next step before {name} has read that of this one"
                yield Finding(rule="transfer", message=message)
        elif action.kind == "RECV" and position > compute:
            yield Finding(
                rule="transfer", message=f"rank {rank.rank} lists {action} after {name} has needed the tensor"
            )


def _both_ends(program: Program) -> Iterator[Finding]:
    """For each pair of ranks, the same transfers in the same order on both."""
    by_pair: dict[tuple[int, int], dict[int, list[_Transfer]]] = {}
    known = {rank.rank for rank in program.ranks}
    for rank in program.ranks:
        for action in rank.actions:
            if action.kind not in ("SEND", "RECV"):
                continue
            if action.peer not in known or action.peer == rank.rank:
                yield Finding(rule="peer", message=f"rank {rank.rank} lists {action}: no such peer in the program")
                continue
            source, target = (rank.rank, action.peer) if action.kind == "SEND" else (action.peer, rank.rank)
            pair = (min(source, target), max(source, target))
            transfer = (action.tensor, action.microbatch, action.bytes, source, target)
            by_pair.setdefault(pair, {}).setdefault(rank.rank, []).append(transfer)
    for (low, high), ends in sorted(by_pair.items()):
        first, second = ends.get(low, []), ends.get(high, [])
        for index in range(max(len(first), len(second))):
            a = first[index] if index < len(first) else None
            b = second[index] if index < len(second) else None
            if a != b:
                both = f"{_transfer_text(a)} on rank {low} and {_transfer_text(b)} on rank {high}"
                message = f"transfer {index} between ranks {low} and {high} is {both}"
                yield Finding(rule="transfer order", message=message)
                break


def _transfer_text(transfer: _Transfer | None) -> str:
    if transfer is None:
        return "nothing"
    tensor, microbatch, size, source, target = transfer
    return f"{tensor} of microbatch {microbatch} ({size} bytes) {source} -> {target}"


def _reductions(program: Program) -> Iterator[Finding]:
    """All listed replicas of a stage reduce its gradients once, or none does, and of the same size."""
    by_stage: dict[int, dict[int, list[int]]] = {}
    for rank in program.ranks:
        for stage in {rank.stage, *(action.stage for action in rank.actions if action.kind == "F")}:
            sizes = [action.bytes for action in rank.actions if action.kind == "REDUCE" and action.stage == stage]
            by_stage.setdefault(stage, {})[rank.rank] = sizes
    for stage, of_rank in sorted(by_stage.items()):
        for rank_number, sizes in of_rank.items():
            first, expected = next(iter(of_rank.items()))
            if sizes != expected or len(sizes) > 1:
                there = f"rank {first} {len(expected)} times ({sum(expected)} bytes)"
                here = f"rank {rank_number} {len(sizes)} times ({sum(sizes)} bytes)"
                yield Finding(rule="reduction", message=f"gradients of stage {stage} are reduced by {there}, by {here}")
                break


def _ties(program: Program) -> Iterator[Finding]:
    """What stages share is summed behind the reductions of the rank, by several ranks of each replica, each once and of
    the same size, and by the same stages in every replica."""
    by_tie: dict[int, dict[int, list[tuple[int, int]]]] = {}
    for rank in program.ranks:
        ties = [action for action in rank.actions if action.kind == "TIE"]
        for tie in ties:
            of_replica = by_tie.setdefault(tie.microbatch, {}).setdefault(rank.replica, [])
            of_replica.append((tie.stage, tie.bytes))
        ends = [action.kind for action in rank.actions if action.kind in ("REDUCE", "TIE", "STEP")]
        if ends != sorted(ends, key=("REDUCE", "TIE", "STEP").index):
            yield Finding(rule="tie", message=f"rank {rank.rank} lists {', '.join(ends)}: reductions, ties, one update")
    for number, of_replicas in sorted(by_tie.items()):
        (first, expected), *others = sorted(of_replicas.items())
        sizes = {size for _, size in expected}
        stages = [stage for stage, _ in expected]
        if len(sizes) > 1 or len(set(stages)) < len(stages) or (len(stages) == 1 and sizes != {0}):
            listed = ", ".join(f"stage {stage} ({size} bytes)" for stage, size in expected)
            yield Finding(rule="tie", message=f"tie {number} is summed in replica {first} by {listed}")
        for replica, found in others:
            if sorted(found) != sorted(expected):
                message = f"tie {number} is summed by {len(expected)} ranks in replica {first}, by {len(found)} in "
                yield Finding(rule="tie", message=f"{message}{replica}")


def _node(rank: RankProgram, position: int, action: Action) -> _Node:
    """One node for both ends of a transfer, for a reduction on all replicas, and for a sum over stages."""
    if action.kind == "SEND":
        return ("transfer", rank.rank, action.peer, action.tensor, action.microbatch)
    if action.kind == "RECV":
        return ("transfer", action.peer, rank.rank, action.tensor, action.microbatch)
    if action.kind == "REDUCE":
        return ("reduce", action.stage)
    if action.kind == "TIE":
        return ("tie", action.microbatch, rank.replica)
    return (rank.rank, position)


def circles(program: Program) -> Iterator[Finding]:
    """Remove nodes that wait for nothing until none is left; what remains waits in a circle."""
    before: _Before = {}
    after: dict[_Node, list[_Node]] = {}
    for rank in program.ranks:
        previous: tuple[_Node, Action] | None = None
        for position, action in enumerate(rank.actions):
            node = _node(rank, position, action)
            before.setdefault(node, [])
            if previous is not None:
                before[node].append((previous[0], (rank.rank, previous[1], action)))
                after.setdefault(previous[0], []).append(node)
            previous = (node, action)
    waits = {node: len(needs) for node, needs in before.items()}
    free = [node for node, count in waits.items() if count == 0]
    while free:
        node = free.pop()
        del waits[node]
        for later in after.get(node, ()):
            waits[later] -= 1
            if waits[later] == 0:
                free.append(later)
    if waits:
        yield Finding(rule="deadlock", message=f"ranks wait in a circle: {'; '.join(_walk_back(before, set(waits)))}")


def _walk_back(before: _Before, stuck: set[_Node]) -> Sequence[str]:
    """The reasons along one cycle inside `stuck`, where every node has a stuck predecessor."""
    node = next(candidate for candidate in before if candidate in stuck)
    path: list[_Node] = []
    reasons: list[str] = []
    while node not in path:
        path.append(node)
        node, (rank, early, late) = next((other, why) for other, why in before[node] if other in stuck)
        reasons.append(f"rank {rank}: {early} before {late}")
    return list(reversed(reasons[path.index(node) :]))
