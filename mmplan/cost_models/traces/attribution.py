"""Which operator, phase of the step and part of the model each kernel was launched for.

A kernel is joined to the host by the correlation id of its launching call, or by the external id of its operator where
calls were not recorded. Backward kernels are launched by autograd's thread, outside of all modules: the sequence
number of their operator names the forward operator that they belong to.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mmplan.cost_models.traces.intervals import Ints
from mmplan.cost_models.traces.modules_of import MODULE, part_of
from mmplan.cost_models.traces.recording import CALL, MARK, OPERATOR, PYTHON, Columns, Recording

PHASES = ("other", "forward", "backward", "optimizer", "data loading")
OTHER, FORWARD, BACKWARD, OPTIMIZER, LOADING = range(5)

_PHASE_OF_NAME = (
    (OPTIMIZER, re.compile(r"^Optimizer\.|\boptimi[sz]er\b", re.IGNORECASE)),
    (LOADING, re.compile(r"enumerate\(DataLoader\)|\bload_batch\b|\bdata_?loader\b|\bwait_for_batch\b", re.IGNORECASE)),
    (BACKWARD, re.compile(r"^autograd::engine::evaluate_function|\bbackward\b|\bbwd\b", re.IGNORECASE)),
    (FORWARD, re.compile(r"\bforward\b|\bfwd\b", re.IGNORECASE)),
)
_PIECE = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Attribution:
    """`launch`: row of the host that launched each kernel, -1 where none is recorded. By host row: `parent` (-1: none),
    `operator` (innermost, itself included), `phase` (of `PHASES`), `part` (of `parts`).

    `calls`: part -> how often its forward was entered: the most of any single range.
    """

    launch: Ints
    parent: Ints
    operator: Ints
    phase: Ints
    part: Ints
    parts: tuple[str, ...]
    calls: dict[str, int]

    def of_work(self, column: Ints, missing: int) -> Ints:
        """A host column read for each kernel."""
        if len(column) == 0:
            return np.full(len(self.launch), missing, np.int64)
        values: Ints = np.where(self.launch >= 0, column[self.launch], missing)
        return values


def attribute(recording: Recording) -> Attribution:
    """Join both sides of a recording."""
    host, names = recording.host, recording.names
    used = set(np.unique(host.name).tolist())
    may_name_phase = [_phase_of(names[i]) if i in used else OTHER for i in range(len(names))]
    parts: dict[str, int] = {}
    part_of_name: list[tuple[int, bool]] = [(-1, False)] * len(names)
    for i in used:
        found = part_of(names[i])
        if found is not None:
            part_of_name[i] = parts.setdefault(found[0], len(parts)), found[1]
    modules = [name.startswith(MODULE) for name in names]
    parent, operator, phase, part_row, entered = _descend(recording, may_name_phase, part_of_name, modules)
    _backward_parts(recording, phase, part_row)
    calls: dict[str, int] = {}
    for (part_index, _), count in entered.items():
        name = list(parts)[part_index]
        calls[name] = max(calls.get(name, 0), count)
    return Attribution(
        launch=_launches(recording),
        parent=parent,
        operator=operator,
        phase=phase,
        part=part_row,
        parts=tuple(parts),
        calls=calls,
    )


def _phase_of(name: str) -> int:
    return next((phase for phase, words in _PHASE_OF_NAME if words.search(name[:300])), OTHER)


def _descend(
    recording: Recording, phase_of_name: list[int], part_of_name: list[tuple[int, bool]], modules: list[bool]
) -> tuple[Ints, Ints, Ints, Ints, dict[tuple[int, int], int]]:
    """Parents and what rows inherit from them, thread by thread in nesting order."""
    host = recording.host
    found = Columns("iiii")
    entered: dict[tuple[int, int], int] = {}
    columns = (host.start_ns, host.end_ns, host.thread, host.name, host.kind, host.sequence, host.backward)
    stack: list[tuple[int, int, int, int, int, bool]] = []  # end, row, operator, phase, part, whether it is sure
    last_thread = -1
    for row, (start_ns, end_ns, thread, name, kind, sequence, backward) in enumerate(_rows(columns)):
        if thread != last_thread:
            stack, last_thread = [], thread
        while stack and stack[-1][0] <= start_ns:
            stack.pop()
        above, own_operator, own_phase, own_part, sure = -1, -1, OTHER, -1, False
        if stack:
            _, above, own_operator, own_phase, own_part, sure = stack[-1]
        if kind == OPERATOR:
            own_operator = row
        if kind in (OPERATOR, MARK) and phase_of_name[name] and own_phase in (OTHER, FORWARD):
            own_phase = phase_of_name[name]  # operators inside the optimizer's or the loader's range stay theirs
        if kind == OPERATOR and own_phase == OTHER and sequence >= 0:
            own_phase = BACKWARD if backward else FORWARD
        named_part, said = part_of_name[name]
        names_part = named_part >= 0 and (kind == MARK or (kind == PYTHON and modules[name]))
        if names_part and (own_part < 0 or (said and not sure)):  # the outermost, unless only a guess
            own_part, sure = named_part, said
            if own_phase in (OTHER, FORWARD):
                entered[own_part, name] = entered.get((own_part, name), 0) + 1
        found.add((above, own_operator, own_phase, own_part))
        stack.append((end_ns, row, own_operator, own_phase, own_part, sure))
    parent, operator, phase, part = map(found.take, range(4))
    return parent, operator, phase, part, entered


def _rows(columns: tuple[Ints, ...]) -> Iterator[tuple[int, ...]]:
    """Rows as Python integers, a piece at a time: a million of them at once would be 200 MB."""
    for begin in range(0, len(columns[0]), _PIECE):
        yield from zip(*(column[begin : begin + _PIECE].tolist() for column in columns), strict=True)


def _backward_parts(recording: Recording, phase: Ints, part: Ints) -> None:
    """Rows of backward get the part of the forward operator with their sequence number; in place, children too."""
    host = recording.host
    forward = (host.kind == OPERATOR) & (host.sequence >= 0) & (part >= 0) & (phase != BACKWARD)
    if not forward.any():
        return
    of_sequence = dict(zip(host.sequence[forward].tolist(), part[forward].tolist(), strict=True))
    wanted = np.flatnonzero((host.kind == OPERATOR) & (host.sequence >= 0) & (part < 0) & (phase == BACKWARD))
    for row, sequence in zip(wanted.tolist(), host.sequence[wanted].tolist(), strict=True):
        found = of_sequence.get(sequence)
        if found is None or part[row] >= 0:
            continue
        # rows nested in this one follow it directly
        last = row + 1
        while last < len(host) and host.thread[last] == host.thread[row] and host.start_ns[last] < host.end_ns[row]:
            last += 1
        inside = slice(row, last)
        part[inside] = np.where(part[inside] < 0, found, part[inside])


def _launches(recording: Recording) -> Ints:
    """The host row of each kernel's launch: the call with its correlation id, else the operator with its external
    id.
    """
    host, work = recording.host, recording.work
    by_call = _joined(work.correlation, host.correlation, host.kind == CALL)
    # older files repeat the correlation as the external id of kernels: then it names no operator
    external = np.where(work.external == work.correlation, -1, work.external)
    by_operator = _joined(external, host.external, host.kind == OPERATOR)
    found: Ints = np.where(by_call >= 0, by_call, by_operator)
    return found


def _joined(wanted: Ints, ids: Ints, rows: Ints) -> Ints:
    """For each wanted id the first of these rows that has it; -1 for none."""
    candidates = np.flatnonzero(rows & (ids >= 0))
    if len(candidates) == 0:
        return np.full(len(wanted), -1, np.int64)
    order = candidates[np.argsort(ids[candidates], kind="stable")]
    at = np.minimum(np.searchsorted(ids[order], wanted), len(order) - 1)
    found: Ints = np.where((wanted >= 0) & (ids[order[at]] == wanted), order[at], -1)
    return found
