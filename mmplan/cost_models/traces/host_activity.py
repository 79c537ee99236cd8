"""What the host did in a stretch of time, by what its rows are called: the causes of idle devices that can be named."""

import re
from dataclasses import dataclass

import numpy as np

from mmplan.cost_models.traces.attribution import Attribution
from mmplan.cost_models.traces.intervals import Ints, covered_ns, union
from mmplan.cost_models.traces.kernel_classes import short_name
from mmplan.cost_models.traces.recording import MARK, PYTHON, SYSTEM, Recording

# The more special cause stands first: `.item()` contains a copy, which contains a synchronisation.
_CAUSES = (
    (
        "data loading",
        r"enumerate\(DataLoader\)|_DataLoaderIter|dataloader.*(__next__|next_data)|load_batch|wait_for_batch|data_?load",
    ),
    (".item()", r"^aten::(item|_local_scalar_dense|is_nonzero|equal)$"),
    (
        "memory allocation",
        r"^(cuda|hip|cu)(Malloc|Free|HostAlloc|HostFree|FreeHost|MemAlloc|MemHostAlloc|MemCreate|MemMap|MemUnmap|MemFree|"
        r"MemRelease|ExtMalloc|HostRegister|HostUnregister)",
    ),
    (
        "compilation or loading of kernels",
        r"ModuleLoad|LibraryLoad|LinkAdd|LinkComplete|TorchDynamo|inductor|CompiledFxGraph|triton.*compile|nvrtc|FuncLoad",
    ),
    ("waiting for a collective", r"barrier|^gloo:|^c10d::|nccl.*wait|ProcessGroup.*wait|Work::wait"),
    ("checkpoint", r"save_checkpoint|torch\.save|checkpoint.*save|state_dict"),
    ("a copy to or from the host", r"^(cuda|hip|cu)Memcpy"),
    ("host synchronisation", r"(Device|Stream|Event|Ctx|Context)Synchronize"),
    ("garbage collection", r"gc\.collect|garbage"),
)
_ITEM = next(index for index, (cause, _) in enumerate(_CAUSES) if cause == ".item()")
_COMPILED = tuple((cause, re.compile(words, re.IGNORECASE)) for cause, words in _CAUSES)
_ANNOTATED = re.compile(r"^ProfilerStep|^Iteration|^profiler|^PyTorch Profiler", re.IGNORECASE)
_WAITS_FOR_DEVICE = re.compile(r"(Device|Stream|Event|Ctx|Context)Synchronize|^(cuda|hip|cu)Memcpy|^(cuda|hip)Free")

NOTHING, OWN_WORK = "nothing recorded on the host", "the host's own work between launches"
_ENOUGH = 0.3  # of a gap that a cause has to cover to be named
_LEAST_RECORDED = 0.1
_MOST_TOLD = 20_000  # rows


@dataclass(frozen=True, slots=True)
class Activity:
    """`cause` with the call that shows it, and the longest rows in words."""

    cause: str
    host: str


class HostActivity:
    """Answers for stretches of one recording."""

    def __init__(self, recording: Recording, attribution: Attribution) -> None:
        self._recording, self._parent = recording, attribution.parent
        host, names = recording.host, recording.names
        used = np.unique(host.name).tolist() if len(host) else []
        self._cause = np.full(len(names), -1, np.int64)
        whole, self._waits = np.zeros(len(names), bool), np.zeros(len(names), bool)
        for i in used:
            found = next((k for k, (_, words) in enumerate(_COMPILED) if words.search(names[i][:300])), -1)
            self._cause[i], whole[i] = found, _ANNOTATED.search(names[i][:300]) is not None
            self._waits[i] = _WAITS_FOR_DEVICE.search(names[i][:300]) is not None
        self._threads = np.unique(host.thread[attribution.launch[attribution.launch >= 0]])
        rows = np.flatnonzero(~whole[host.name]) if len(host) else np.zeros(0, np.int64)
        order = np.argsort(host.start_ns[rows], kind="stable")
        self._rows = rows[order]
        self._start_ns = host.start_ns[self._rows]
        self._reach_ns = np.maximum.accumulate(host.end_ns[self._rows]) if len(rows) else self._start_ns

    def during(self, begin_ns: int, end_ns: int) -> Activity:
        """The cause that covers most of [begin, end), on the threads that launch kernels where any are known."""
        host, names = self._recording.host, self._recording.names
        # rows that begin before `end`, from the first that could reach over `begin`
        first = int(np.searchsorted(self._reach_ns, begin_ns, side="right"))
        last = int(np.searchsorted(self._start_ns, end_ns, side="left"))
        rows = self._rows[first:last]
        rows = rows[host.end_ns[rows] > begin_ns]
        if len(self._threads):
            rows = rows[np.isin(host.thread[rows], self._threads)]
        if len(rows) == 0:
            return Activity(NOTHING, "")
        length_ns = end_ns - begin_ns
        clipped_begin, clipped_end = np.maximum(host.start_ns[rows], begin_ns), np.minimum(host.end_ns[rows], end_ns)
        told = self._told(rows, clipped_end - clipped_begin)
        for index, (cause, _) in enumerate(_COMPILED):
            mine = self._cause[host.name[rows]] == index
            covered = union(clipped_begin[mine], clipped_end[mine])
            if covered.seconds and int((covered.end_ns - covered.start_ns).sum()) >= _ENOUGH * length_ns:
                longest = rows[mine][int((clipped_end - clipped_begin)[mine].argmax())]
                return Activity(f"{cause} ({short_name(names[int(host.name[longest])])})", told)
        drained = self._synchronised(begin_ns, end_ns)
        busy = union(clipped_begin, clipped_end)
        if int(covered_ns(busy, np.array([begin_ns]), np.array([end_ns]))[0]) < _LEAST_RECORDED * length_ns:
            return Activity(f"{NOTHING}{f' after {drained}' if drained else ''}", told)
        if drained:
            return Activity(f"host synchronisation ({drained}), then {OWN_WORK}", told)
        return Activity(OWN_WORK, told)

    def _synchronised(self, begin_ns: int, end_ns: int) -> str:
        """A call in which the host waited as the device ran dry."""
        host, names = self._recording.host, self._recording.names
        first = int(np.searchsorted(self._reach_ns, begin_ns, side="left"))
        last = int(np.searchsorted(self._start_ns, begin_ns, side="right"))
        rows = self._rows[first:last]
        rows = rows[self._waits[host.name[rows]] & (host.end_ns[rows] >= begin_ns) & (host.end_ns[rows] < end_ns)]
        if len(rows) == 0:
            return ""
        row = above = int(rows[-1])
        while above >= 0:
            if self._cause[host.name[above]] == _ITEM:
                return f"{names[int(host.name[above])]}, {names[int(host.name[row])]}"
            above = int(self._parent[above])
        return short_name(names[int(host.name[row])])

    def _told(self, rows: Ints, overlap_ns: Ints) -> str:
        """The three names with most time; of nested ones the innermost that holds nearly all of it."""
        host, names = self._recording.host, self._recording.names
        rows, overlap_ns = rows[:_MOST_TOLD], overlap_ns[:_MOST_TOLD]
        inner = set(self._parent[rows].tolist())
        sums: dict[int, int] = {}
        for row, length in zip(rows.tolist(), overlap_ns.tolist(), strict=True):
            if row not in inner or host.kind[row] in (MARK, PYTHON, SYSTEM):
                sums[int(host.name[row])] = sums.get(int(host.name[row]), 0) + length
        longest = sorted(sums, key=lambda name: -sums[name])[:3]
        return ", ".join(short_name(names[name]) for name in longest)
