"""What the head of a profiler's file says of the job: rank, ranks in all, devices; some versions write it as Python
text.
"""

import ast
import re
from collections.abc import Mapping
from pathlib import Path

from mmplan.cost_models.formats.kineto_arguments import NCCL, integer
from mmplan.cost_models.traces.gathering import Gathered

HEAD_KEYS = ("distributedInfo", "deviceProperties")
_RANK_IN_NAME = re.compile(r"(?<![a-z])rank[-_. ]?(\d{1,6})(?!\d)", re.IGNORECASE)
_ON_DEVICE = re.compile(r"^(cuda|hip|cu)[A-Z]\w*|^nccl[:A-Z]")


def rank_of(head: Mapping[str, object], labels: list[str], path: Path) -> tuple[int | None, int | None, list[str]]:
    """(rank, ranks in the job, what is doubtful about it): by distributedInfo, the file's name, or a process's
    label.
    """
    info = _values(head.get("distributedInfo"))
    of_name = rank_in_name(path)
    rank = integer(info.get("rank")) if isinstance(info, dict) else -1
    world = integer(info.get("world_size")) if isinstance(info, dict) else -1
    if rank >= 0:
        doubts = []
        if 0 < world <= rank:
            doubts.append(f"{path.name}: distributedInfo says rank {rank} of {world}")
        if of_name is not None and of_name != rank:
            doubts.append(f"{path.name}: the file is called rank {of_name}, distributedInfo in it says {rank}")
        return rank, world if world > 0 else None, doubts
    missing = f"{path.name}: no distributedInfo (the job had no process group, or an old version wrote the file)"
    labelled = next((int(match[1]) for label in labels if (match := _RANK_IN_NAME.search(label))), None)
    found = of_name if of_name is not None else labelled
    where = "by the file's name" if of_name is not None else "by the label of its process"
    return found, None, [missing + (f": rank {found} {where}" if found is not None else ": its rank is unknown")]


def rank_in_name(path: Path) -> int | None:
    """7 of `trace_rank-7.json`."""
    match = _RANK_IN_NAME.search(path.name)
    return int(match[1]) if match else None


def uses_device(head: Mapping[str, object], gathered: Gathered) -> bool:
    """Whether the job ran on GPUs, so that a file without their work lacks a part."""
    info = _values(head.get("distributedInfo"))
    if isinstance(info, dict) and info.get("backend") == "gloo":
        return False
    if _values(head.get("deviceProperties")) or any(message.group == NCCL for message in gathered.messages.values):
        return True
    return any(_ON_DEVICE.match(name) for name in gathered.names.values)


def device_names(head: Mapping[str, object]) -> dict[int, str]:
    """Names by device number, as the driver has them."""
    properties = _values(head.get("deviceProperties"))
    if not isinstance(properties, list):
        return {}
    return {integer(item.get("id")): str(item.get("name", ""))[:80] for item in properties if isinstance(item, dict)}


def _values(value: object) -> object:
    """A value of the head, out of its text where it is one."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
    return value
