"""Chrome traces of NCCL's profiler plug-in: which collectives ran, how often and of what size, but not how long.

The file is a list of begin and end events that the example plug-in never closes. A COLL event lasts from the call to
its enqueueing on the host, not while the kernel runs (github.com/NVIDIA/nccl issue 1765), so that no time is taken from
it.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mmplan.cost_models.formats.json_stream import Cut, json_items
from mmplan.cost_models.formats.kineto_arguments import element_bytes, integer
from mmplan.cost_models.formats.kineto_head import rank_in_name
from mmplan.cost_models.traces.kernel_classes import collective
from mmplan.cost_models.traces.record import SCHEMA, MessageTime, RankTrace, TraceRecord, record_document
from mmplan.cost_models.traces.recording import Message
from mmplan.errors import InputError
from mmplan.scenario.document import counted
from mmplan.scenario.formats.reading import Head, Reading

_OPERATIONS = ("COLL", "P2P")
_COUNT_IS_A_SHARE = ("all_gather", "reduce_scatter")  # of one rank (nccl.h: sendcount, recvcount)
_MOST_KINDS = 100_000


def looks_like_nccl_profiler(head: Head) -> bool:
    """A list of events with NCCL's own words."""
    text = head.text.lstrip()
    return (
        text.startswith("[") and '"COLL"' in text and ('"CommHash"' in text or '"SeqNum"' in text or '"GROUP"' in text)
    )


def read_nccl_profiler(paths: Sequence[Path]) -> Reading:
    """The counts and sizes of each file's collectives.

    Raises:
        InputError: no events of NCCL's profiler.
    """
    ranks, read, warnings = list[RankTrace](), list[str](), list[str]()
    for path in paths:
        trace, cut = _read(path)
        ranks.append(trace)
        calls = sum(message.count for message in trace.messages)
        kinds = ", ".join(sorted({message.collective for message in trace.messages}))
        read.append(f"{path.name}: {counted(calls, 'call')} of {kinds}, rank {trace.rank}")
        if cut is not None:
            end = f"line {cut.line}: {cut.reason}: the whole events are read"
            warnings.append(f"{path.name}: {end} (the plug-in never closes its list)")
    return Reading(
        kind="nccl-profiler",
        fragment=record_document(TraceRecord(schema=SCHEMA, ranks=tuple(ranks))),
        document="record of collectives without times",
        read=tuple(read),
        ignored=(
            "times: a COLL event ends when the call is enqueued, not when its kernel ends; Kineto has the kernels",
        ),
        warnings=tuple(warnings),
    )


def _read(path: Path) -> tuple[RankTrace, Cut | None]:
    messages: Counter[Message] = Counter()
    ranks: Counter[int] = Counter()
    events, cut = 0, None
    for key, event in json_items(path, ("traceEvents",)):
        if isinstance(event, Cut):
            cut = event
        elif key in ("", "traceEvents") and isinstance(event, dict) and event.get("cat") in _OPERATIONS:
            events += 1
            arguments = event.get("args")
            if event.get("ph") in ("b", "B", "X") and isinstance(arguments, dict):
                messages[_message(str(event.get("name")), arguments)] += 1
                ranks[integer(arguments.get("Rank"))] += 1
            if len(messages) > _MOST_KINDS:
                raise InputError(f"more than {_MOST_KINDS:,} kinds of messages", file=path)
    if not events:
        raise InputError("no COLL or P2P event of NCCL's profiler plug-in in it", file=path)
    known = [rank for rank in ranks if rank >= 0]
    rank = known[0] if len(known) == 1 else rank_in_name(path)
    rows = [
        MessageTime(
            collective=message.collective,
            bytes=message.bytes,
            ranks=message.ranks,
            group=message.group,
            count=count,
            seconds=None,
            fastest_s=None,
            median_s=None,
        )
        for message, count in messages.most_common()
    ]
    return RankTrace(file=path.name, source="nccl profiler", rank=rank, messages=tuple(rows)), cut


def _message(name: str, arguments: dict[str, object]) -> Message:
    what, count, size = collective(name), integer(arguments.get("Count")), element_bytes(arguments.get("Datatype"))
    ranks = integer(arguments.get("nRanks", arguments.get("NRanks")))
    total = count * size if count >= 0 and size is not None else None
    if what in _COUNT_IS_A_SHARE and total is not None:
        total = total * ranks if ranks > 0 else None
    group = arguments.get("CommHash")
    return Message(what, total, ranks if ranks > 0 else None, str(group)[:40] if group is not None else "")
