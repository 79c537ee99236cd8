"""The files that `mmplan import` knows: how each kind is recognised, and who reads it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mmplan.cost_models.formats.chakra import looks_like_chakra, read_chakra
from mmplan.cost_models.formats.hf_reading import looks_like_hf_config, read_hf_configs
from mmplan.cost_models.formats.nccl_profiler import looks_like_nccl_profiler, read_nccl_profiler
from mmplan.cost_models.formats.nccl_reading import looks_like_nccl, read_nccl
from mmplan.cost_models.formats.trace_modalities import read_trace_modalities
from mmplan.cost_models.formats.trace_profile import read_trace_profile
from mmplan.cost_models.formats.trace_reading import looks_like_kineto, looks_like_nsys, read_kineto, read_nsys
from mmplan.errors import InputError
from mmplan.planner.formats.launch_scenario import launch_reading, machines_reading
from mmplan.planner.row_stack import device_in
from mmplan.scenario.document import did_you_mean, listed
from mmplan.scenario.formats.hostfile import looks_like_hosts, read_hosts
from mmplan.scenario.formats.launch.deepspeed import looks_like_deepspeed, read_deepspeed
from mmplan.scenario.formats.launch.facts import SetUp, merged
from mmplan.scenario.formats.launch.framework_yaml import FRAMEWORKS, looks_like_framework, read_framework
from mmplan.scenario.formats.launch.script import (
    hf_set_up,
    looks_like_script,
    looks_like_swift,
    read_script,
    read_swift,
)
from mmplan.scenario.formats.launch.torchtitan import looks_like_torchtitan, read_torchtitan
from mmplan.scenario.formats.logs.reading import (
    log_set_up,
    looks_like_megatron_log,
    looks_like_training_log,
    read_log,
)
from mmplan.scenario.formats.nvidia_topo import looks_like_nvidia_topo, read_nvidia_topo
from mmplan.scenario.formats.reading import MORE_BYTES, Head, Reading, read_head
from mmplan.scenario.formats.rocm_topo import looks_like_rocm_topo, read_rocm_topo
from mmplan.scenario.text_bytes import refuse_pipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """`looks_like` sees the first 64 KB, and 2 MB where no kind knows these; `read` takes all files of one call.

    Files with a `set_up` may be of several kinds: what they say of one training run is put together.
    """

    what: str
    looks_like: Callable[[Head], bool]
    read: Callable[[Sequence[Path]], Reading]
    set_up: Callable[[Path], SetUp] | None = None


def _launch(what: str, looks_like: Callable[[Head], bool], set_up: Callable[[Path], SetUp]) -> Kind:
    """A kind of file that says how a run is launched."""
    return Kind(
        what=what,
        looks_like=looks_like,
        read=lambda paths: launch_reading(merged([set_up(path) for path in paths])),
        set_up=set_up,
    )


# The first kind that recognises a file reads it, so those with the surest marks stand first.
KINDS: dict[str, Kind] = {
    "kineto": Kind(
        what="trace of the PyTorch profiler, one file per rank", looks_like=looks_like_kineto, read=read_kineto
    ),
    "nsys": Kind(
        what="Nsight Systems or nvprof: SQLite export, tables of `nsys stats`",
        looks_like=looks_like_nsys,
        read=read_nsys,
    ),
    "chakra": Kind(
        what="execution trace of Chakra or of PyTorch's observer", looks_like=looks_like_chakra, read=read_chakra
    ),
    "nccl-profiler": Kind(
        what="trace of NCCL's profiler plug-in", looks_like=looks_like_nccl_profiler, read=read_nccl_profiler
    ),
    "trace-profile": Kind(
        what="profile of the device and its link from traces (never guessed)",
        looks_like=lambda head: False,
        read=read_trace_profile,
    ),
    "trace-modalities": Kind(
        what="seconds of each modality from traces, for `mmplan replan` (never guessed)",
        looks_like=lambda head: False,
        read=read_trace_modalities,
    ),
    "hf": Kind(
        what="config.json of a Hugging Face model",
        looks_like=looks_like_hf_config,
        read=read_hf_configs,
        set_up=hf_set_up,
    ),
    "nccl": Kind(what="log of nccl-tests or rccl-tests", looks_like=looks_like_nccl, read=read_nccl),
    "rocm-topo": Kind(
        what="rocm-smi --showtopo or amd-smi topology", looks_like=looks_like_rocm_topo, read=read_rocm_topo
    ),
    "nvidia-topo": Kind(
        what="nvidia-smi topo -m, also of several hosts", looks_like=looks_like_nvidia_topo, read=read_nvidia_topo
    ),
    "deepspeed": _launch("DeepSpeed's JSON settings", looks_like_deepspeed, read_deepspeed),
    "torchtitan": _launch("TOML configuration of torchtitan", looks_like_torchtitan, read_torchtitan),
    **{
        name: _launch(f"YAML configuration of {name}", looks_like_framework(name), read_framework(name))
        for name in FRAMEWORKS
        if name != "ms-swift"
    },
    "megatron-log": Kind(
        what="log of a training with Megatron-LM, its forks, NeMo, DeepSpeed's pipelines",
        looks_like=looks_like_megatron_log,
        read=read_log("megatron-log"),
        set_up=log_set_up("megatron-log"),
    ),
    "training-log": Kind(
        what="log of a training with the Hugging Face Trainer and what is made of it, torchtitan, Lightning, DeepSpeed",
        looks_like=looks_like_training_log,
        read=read_log("training-log"),
        set_up=log_set_up("training-log"),
    ),
    "ms-swift": _launch("launch script, arguments or YAML of ms-swift", looks_like_swift, read_swift),
    "megatron": _launch(
        "launch script or arguments of Megatron-LM, its forks or the Hugging Face Trainer",
        looks_like_script,
        read_script,
    ),
    "job": Kind(
        what="your own model and data, a Python file with `model` and `batches`, which is run (never guessed)",
        looks_like=lambda head: False,
        read=lambda paths: _read_jobs(paths),
    ),
    "hosts": Kind(what="Slurm host list or hostfile", looks_like=looks_like_hosts, read=read_hosts),
}


def _read_jobs(paths: Sequence[Path]) -> Reading:
    from mmplan.runtime.ghost.importing import read_jobs  # torch

    return read_jobs(paths)


def read_files(words: Sequence[str]) -> Reading:
    """The reading of `KIND FILE...` or `FILE...`.

    Raises:
        InputError: no files, a pipe, an unknown kind, files of several kinds or of none, or one its reader refuses.
    """
    named = words[0] if words[0] in KINDS else None
    if named is not None and Path(named).exists() and len(words) == 1:
        named = None  # a file that is called like a kind
    paths = [Path(word) for word in (words[1:] if named else words)]
    if not paths:
        raise InputError(f"expected files after '{named}'")
    for path in paths:
        refuse_pipe(path)
    if named is not None:
        return KINDS[named].read(paths)
    kinds = _guess(paths)
    if len(set(kinds.values())) == 1:
        return KINDS[kinds[paths[0]]].read(paths)
    return _together(kinds)


def _together(kinds: Mapping[Path, str]) -> Reading:
    """Files of several kinds that describe one run: how it is launched, its model, and the machines it runs on."""
    set_ups = [set_up(path) for path, kind in kinds.items() if (set_up := KINDS[kind].set_up) is not None]
    others = {kind for kind in kinds.values() if KINDS[kind].set_up is None}
    named = next((str(setup.facts["gpu"].value) for setup in set_ups if "gpu" in setup.facts), "")
    machines = _machines({kind: [path for path in kinds if kinds[path] == kind] for kind in sorted(others)}, named)
    if len(machines) > 1 or set_ups:
        machines = [_without_record(reading) for reading in machines]
    clusters = all(set(reading.fragment) == {"cluster"} for reading in machines)
    if not set_ups and clusters:
        return machines_reading(machines)
    if not set_ups or not clusters:
        told = ", ".join(f"'{path}' is {kind}" for path, kind in kinds.items())
        raise InputError(f"expected files of one kind, files of the machines, or launch files with these: {told}")
    return launch_reading(merged(set_ups), machines)


def _without_record(reading: Reading) -> Reading:
    """Collectives that give no link beside files that do: what was read stays told."""
    return replace(reading, fragment={"cluster": {}}) if set(reading.fragment) == {"collectives"} else reading


def _machines(paths_of: Mapping[str, Sequence[Path]], gpu: str) -> list[Reading]:
    """Files of the machines, a reading for each kind; what one names helps to read another.

    A host list says how the ranks of collectives lie on nodes. A device that a single file names, or else the `gpu` of
    launch files, is the one whose links stand in the others.
    """
    hosts = _cluster_of(KINDS["hosts"].read(paths_of["hosts"])) if "hosts" in paths_of else {}

    def read(kind: str, device: str | None = None) -> Reading:
        if kind == "nccl":
            return read_nccl(paths_of[kind], hosts, device)
        return read_nvidia_topo(paths_of[kind], device) if kind == "nvidia-topo" else KINDS[kind].read(paths_of[kind])

    readings = {kind: read(kind) for kind in paths_of}
    devices = {str(named) for reading in readings.values() if (named := _cluster_of(reading).get("device")) is not None}
    device = devices.pop() if len(devices) == 1 else device_in(gpu) if not devices else None
    if device is not None:
        readings |= {kind: read(kind, device) for kind in paths_of if "device" not in _cluster_of(readings[kind])}
    return list(readings.values())


def _cluster_of(reading: Reading) -> Mapping[str, object]:
    cluster = reading.fragment.get("cluster", {})
    assert isinstance(cluster, Mapping)
    return cluster


def _guess(paths: Sequence[Path]) -> dict[Path, str]:
    """The kind of each file."""
    kinds: dict[Path, str] = {}
    for path in paths:
        head = read_head(path)
        kind = _kind_of(head)
        if kind is None and not head.whole:
            kind = _kind_of(read_head(path, MORE_BYTES))
        if kind is None and head.whole and not head.text.strip():
            raise InputError("an empty file", file=path)
        if kind is None and path.suffix == ".py":
            told = "a Python file, and nothing in a file is executed: give the command line that starts it"
            named = "; `mmplan import job FILE` runs a job of your own and records its model"
            raise InputError(f"{told}, settings that it writes, or the log of its run{named}", file=path)
        if kind is None:
            hint = did_you_mean(str(path), KINDS) if path == paths[0] else ""
            raise InputError(f"not a kind of file that is known{hint}; name one of {listed(KINDS, 40)}", file=path)
        kinds[path] = kind
    return kinds


def _kind_of(head: Head) -> str | None:
    return next((name for name, kind in KINDS.items() if kind.looks_like(head)), None)
