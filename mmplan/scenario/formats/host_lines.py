"""The lines of host lists: a host with its slots, a list of hosts, a Slurm command, or a Slurm variable."""

import re
from dataclasses import dataclass
from pathlib import Path

from mmplan.errors import InputError
from mmplan.scenario.document import shown
from mmplan.scenario.formats.host_list import expand_hosts, split_names

MOST_SLOTS = 1024  # as many devices as a node of a scenario has at most
LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST", "NodeList", "LSB_HOSTS")
COUNTS = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "NumNodes")
DEVICES = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "TresPerNode")

_PROMPT = re.compile(r"^(?:\[[^\]]*@[^\]]*\]\s?)?[$+>#]*[$+>]\s+")
_SCONTROL = re.compile(r"^(?:srun\s+)?scontrol\s+show\s+host(?:name|list)s?\s+(\S+)$")
_NAMES = "|".join((*LISTS, *COUNTS, *DEVICES))
_VARIABLE = re.compile(rf"(?:^|\s)(?:export\s+)?({_NAMES})(?:=|:\s+)(\"[^\"]*\"|'[^']*'|\S*)")
_SLOTTED = re.compile(r"^(?P<hosts>[^\s:*@]+)(?:[:*](?P<short>\d+))?(?P<rest>(?:\s+[A-Za-z_-]+\s*=\s*\S+)*)$")
_COUNTED = re.compile(r"^([^\s:*@=]+)\s+(\d+)(?:\s+\S+@\S+\s+\S+)?$")  # Grid Engine's $PE_HOSTFILE, LSF
_SLOT_WORDS = ("slots", "np", "ppn", "gpus", "num_gpus")
_OTHER_WORDS = ("max_slots", "max-slots", "cpu", "cpus", "sockets", "username", "ifname", "port", "rank")
_OTHER_VARIABLE = re.compile(r"^(?:export\s+)?[A-Za-z_][\w:/]*=")
_NUMBER = re.compile(r"\d{1,7}")


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedHosts:
    """Hosts that a line names, with the slots of each where it gives them."""

    hosts: tuple[str, ...]
    slots: int | None
    line: int
    file: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """A Slurm variable, or a field of `scontrol show job`, that says something about nodes."""

    name: str
    value: str
    line: int
    file: Path


def host_line(text: str, file: Path, line: int) -> NamedHosts | list[Variable] | None:
    """What a line names; none of it where it sets other variables, None where it is empty, a comment or a fence."""
    content = _PROMPT.sub("", text.strip())
    content = re.sub(r"(^|\s)#.*", "", content).strip()
    if not content or content.startswith("```"):
        return None
    variables = [
        Variable(name=m[1], value=m[2].strip("\"'"), line=line, file=file) for m in _VARIABLE.finditer(content)
    ]
    if variables or _OTHER_VARIABLE.match(content):
        return variables
    command = _SCONTROL.match(content)
    try:
        if command is not None:
            return NamedHosts(hosts=tuple(expand_hosts(command[1].strip("\"'"))), slots=None, line=line, file=file)
        return _host_line(content, file, line)
    except ValueError as error:
        raise InputError(str(error), file=file, line=line) from None


def _host_line(content: str, file: Path, line: int) -> NamedHosts:
    """`EXPRESSION`, `EXPRESSION:8`, `EXPRESSION*8` or `EXPRESSION slots=8 max_slots=8`, or several with commas."""
    counted = _COUNTED.match(content)
    if counted is not None:
        content = f"{counted[1]} slots={counted[2]}"
    match = _SLOTTED.match(content)
    if match is None and not re.search(r"\s", content):
        return _several(content, file, line)
    if match is None:
        raise ValueError(f"expected a host with slots, such as 'node01 slots=8', found {shown(content)}")
    slots = [_slot_count(match["short"], content)] if match["short"] else []
    for word, value in re.findall(r"([A-Za-z_-]+)\s*=\s*(\S+)", match["rest"]):
        if word.lower() in _SLOT_WORDS:
            slots.append(_slot_count(value, content))
        elif word.lower() not in _OTHER_WORDS:
            raise ValueError(f"expected 'slots=', found {shown(word)} in {shown(content)}")
    if len(set(slots)) > 1:
        raise ValueError(f"{shown(content)} gives {slots[0]} slots and {slots[1]} slots")
    return NamedHosts(
        hosts=tuple(expand_hosts(match["hosts"])), slots=slots[0] if slots else None, line=line, file=file
    )


def _several(content: str, file: Path, line: int) -> NamedHosts:
    """`node01:8,node02:8`, as mpirun -H takes them."""
    pairs = [re.fullmatch(r"([^\s:*@]+)[:*](\d+)", part) for part in split_names(content)]
    found = [(pair[1], _slot_count(pair[2], content)) for pair in pairs if pair is not None]
    if len(found) < len(pairs):
        raise ValueError(f"expected a host or a list of hosts, found {shown(content)}")
    counts = {count for _, count in found}
    if len(counts) > 1:
        told = " and ".join(str(count) for count in sorted(counts))
        raise ValueError(f"{shown(content)} has hosts of {told} slots in a line; write one host a line")
    hosts = tuple(host for expression, _ in found for host in expand_hosts(expression))
    return NamedHosts(hosts=hosts, slots=counts.pop(), line=line, file=file)


def _slot_count(text: str, content: str) -> int:
    if not _NUMBER.fullmatch(text) or not 1 <= int(text) <= MOST_SLOTS:
        raise ValueError(f"expected 1 to {MOST_SLOTS} slots, found {shown(text)} in {shown(content)}")
    return int(text)
