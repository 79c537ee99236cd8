"""Lists of hosts for `mmplan import`: Slurm expressions and variables, hostfiles of mpirun, DeepSpeed, and plain ones.

A host stands once however often it is named. What a host has slots for is taken as its devices, as launchers of one
process per device mean it.
"""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mmplan.errors import InputError
from mmplan.scenario.document import counted
from mmplan.scenario.formats.host_lines import COUNTS, DEVICES, LISTS, MOST_SLOTS, NamedHosts, Variable, host_line
from mmplan.scenario.formats.host_list import MOST_HOSTS, expand_hosts
from mmplan.scenario.formats.reading import Head, Reading, read_lines

_ALMOST = re.compile(r"^[\w.-]+(?:\[\d[\d,-]*(?:\]|$)|\s+slots\s*=)|NODELIST=")
MOST_POOLS = 3
MOST_MENTIONS = 1_000_000
USUAL_DEVICES = 16  # of a node: DGX-2, the largest of NVIDIA's

_LIKE_A_HOST = re.compile(r"[A-Za-z_][\w.-]*\d[\w.-]*|[\w-]+(?:\.[\w-]+)+|localhost|[A-Za-z][\w-]*-[\w-]+")


def looks_like_hosts(head: Head) -> bool:
    """Every line is one of a hostfile, and at least one has a mark that words of other files have not."""
    lines = head.text.splitlines()[: None if head.whole else -1]
    marked = sure = False
    for number, line in enumerate(lines, start=1):
        try:
            found = host_line(line, head.path, number)
        except InputError:
            return sure or _ALMOST.search(line[:2000]) is not None  # its reader says what is wrong
        if isinstance(found, NamedHosts):
            surely = found.slots is not None or "[" in line or "scontrol" in line
            if not surely and not all(_LIKE_A_HOST.fullmatch(host) for host in found.hosts[:100]):
                return False
            sure = sure or surely
        marked = marked or bool(found)
    return marked


def read_hosts(paths: Sequence[Path]) -> Reading:
    """The nodes that files name, and devices of each where they give slots.

    Raises:
        InputError: a line that names no host, brackets that do not pair, a range that runs backwards, more hosts than a
            cluster has, two numbers of slots for one host, or counts that disagree with the list.
    """
    named, variables, ignored = _mentions(paths)
    slots, times = _slots_of(named)
    warnings: list[str] = []
    cluster = _cluster(slots, _devices(variables, ignored), paths[0], warnings)
    if len(slots) > MOST_HOSTS:
        raise InputError(f"{len(slots):,} hosts; a cluster has at most {MOST_HOSTS:,} nodes", file=paths[0])
    _check_count(variables, len(slots))
    _warn(slots, times, warnings)
    told = f"{counted(len(slots), 'node')}: {_shortened(list(slots))}"
    return Reading(
        kind="hosts", fragment={"cluster": cluster}, read=(told,), ignored=tuple(ignored), warnings=tuple(warnings)
    )


def listed_hosts(path: Path) -> dict[str, int | None]:
    """The hosts of a file in their order, with the devices of each, None where the file does not say.

    Raises:
        InputError: as `read_hosts`.
    """
    named, variables, ignored = _mentions([path])
    devices = _devices(variables, ignored)
    return {host: devices if count is None else count for host, count in _slots_of(named)[0].items()}


def _mentions(paths: Sequence[Path]) -> tuple[list[NamedHosts], list[Variable], list[str]]:
    """Hosts as the lines name them, the variables, and what was ignored."""
    named: list[NamedHosts] = []
    variables: list[Variable] = []
    mentions = 0
    others: list[tuple[Path, int]] = []
    for path in paths:
        for number, line in enumerate(read_lines(path), start=1):
            found = host_line(line, path, number)
            if isinstance(found, NamedHosts):
                named.append(found)
                mentions += len(found.hosts)
                if mentions > MOST_MENTIONS:
                    raise InputError(f"hosts are named more than {MOST_MENTIONS:,} times", file=path, line=number)
            elif found:
                variables += found
            elif found is not None:
                others.append((path, number))
    ignored = [f"{counted(len(others), 'line')} of other variables"] if others else []
    if others and not variables:
        message = f"expected a host or a variable such as {LISTS[0]}=node[1-4]"
        raise InputError(message, file=others[0][0], line=others[0][1])
    named += _listed_hosts(variables, ignored)
    if not named:
        raise InputError("expected host names, found none", file=paths[0])
    return named, variables, ignored


def _listed_hosts(variables: Sequence[Variable], ignored: list[str]) -> list[NamedHosts]:
    """The list of the job: the whole job's before the step's."""
    lists = sorted(
        (item for item in variables if item.name in LISTS and item.value not in ("", "(null)")),
        key=lambda item: LISTS.index(item.name),
    )
    kept = [item for item in lists if item.name == lists[0].name]
    others = {item.name for item in lists} - {item.name for item in kept}
    if others:
        ignored.append(f"{', '.join(sorted(others))}: {kept[0].name} is the list of the whole job")
    found = []
    for item in kept:
        try:
            hosts = expand_hosts(",".join(item.value.split()))
        except ValueError as error:
            raise InputError(str(error), file=item.file, line=item.line, key=item.name) from None
        found.append(NamedHosts(hosts=tuple(hosts), slots=None, line=item.line, file=item.file))
    return found


def _slots_of(named: Sequence[NamedHosts]) -> tuple[dict[str, int | None], Counter[str]]:
    """Each host in the order of its first mention, with its slots, and how often it is named."""
    slots: dict[str, int | None] = {}
    said_in: dict[str, NamedHosts] = {}
    times: Counter[str] = Counter()
    for item in named:
        times.update(item.hosts)
        for host in item.hosts:
            known = slots.setdefault(host, item.slots)
            if known is None:
                slots[host] = item.slots
            elif item.slots not in (None, known):
                first = said_in[host]
                message = f"'{host}' has {item.slots} slots here and {known} in line {first.line} of {first.file.name}"
                raise InputError(message, file=item.file, line=item.line)
            if item.slots is not None:
                said_in.setdefault(host, item)
    return slots, times


def _cluster(slots: dict[str, int | None], devices: int | None, file: Path, warnings: list[str]) -> dict[str, object]:
    """`nodes` and `devices_per_node`, or pools where hosts differ."""
    without = [host for host, count in slots.items() if count is None]
    if without:
        if len(without) < len(slots):
            told = f"{len(without)} of {len(slots)} hosts ({_shortened(without)}) give no slots"
            warnings.append(f"{told}: devices_per_node is left out; write it")
        cluster: dict[str, object] = {"nodes": len(slots)}
        if devices is not None and len(without) == len(slots):
            cluster["devices_per_node"] = devices
        return cluster
    counts = Counter(count for count in slots.values() if count is not None)
    if len(counts) == 1:
        return {"nodes": len(slots), "devices_per_node": next(iter(counts))}
    told = ", ".join(f"{nodes} with {count}" for count, nodes in counts.items())
    if len(counts) > MOST_POOLS:
        raise InputError(f"hosts of {len(counts)} sizes ({told}); a cluster has at most {MOST_POOLS} pools", file=file)
    warnings.append(f"hosts differ in slots ({told}): name the device of each pool")
    return {"pools": [{"nodes": nodes, "devices_per_node": count} for count, nodes in counts.items()]}


def _devices(variables: Sequence[Variable], ignored: list[str]) -> int | None:
    """Devices of a node by Slurm's variables, such as `8`, `h100:8` or `gres/gpu:h100:8`."""
    for item in variables:
        match = re.fullmatch(r"(?:gres[/:])?(?:gpu[:=])?(?:[A-Za-z][\w.-]*:)?(\d{1,4})", item.value)
        if item.name in DEVICES and match is not None and 1 <= int(match[1]) <= MOST_SLOTS:
            return int(match[1])
        if item.name in DEVICES:
            ignored.append(f"{item.name}={item.value[:60]}: no number of GPUs of a node")
    return None


def _check_count(variables: Sequence[Variable], nodes: int) -> None:
    for item in variables:
        if item.name in COUNTS and item.value.isdigit() and item.value.lstrip("0") != str(nodes):
            message = f"{item.value[:20]} nodes are said, the list names {nodes}"
            raise InputError(message, file=item.file, line=item.line, key=item.name)


def _warn(slots: dict[str, int | None], times: Counter[str], warnings: list[str]) -> None:
    repeated = {count for count in times.values() if count > 1}
    if repeated:
        each = len(repeated) == 1 and min(times.values()) > 1
        many = (
            f"every host is named {repeated.pop()} times" if each else f"{_more_than_once(times)} named more than once"
        )
        per = ": if a line is a process (PBS, LSF), write as many devices_per_node" if each else ""
        warnings.append(f"{many} and counted once{per}")
    slot_count = max((count for count in slots.values() if count is not None), default=0)
    if slot_count > USUAL_DEVICES:
        warnings.append(
            f"{slot_count} slots of a host are more than nodes have devices: if they are cores, write devices_per_node"
        )
    if "localhost" in slots and len(slots) > 1:
        warnings.append("'localhost' stands beside other hosts and is counted as one more")


def _more_than_once(times: Counter[str]) -> str:
    hosts = [host for host, count in times.items() if count > 1]
    return f"{_shortened(hosts)} {'is' if len(hosts) == 1 else 'are'}"


def _shortened(hosts: Sequence[str]) -> str:
    return ", ".join(hosts) if len(hosts) <= 4 else f"{', '.join(hosts[:3])} ... {hosts[-1]}"
