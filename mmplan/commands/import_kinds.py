"""The files that `mmplan import` knows: how each kind is recognised, and who reads it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmplan.cost_models.formats.trace_reading import looks_like_kineto, read_kineto
from mmplan.errors import InputError
from mmplan.scenario.document import did_you_mean, listed
from mmplan.scenario.formats.hf_reading import looks_like_hf_config, read_hf_configs
from mmplan.scenario.formats.hostfile import looks_like_hosts, read_hosts
from mmplan.scenario.formats.nvidia_topo import looks_like_nvidia_topo, read_nvidia_topo
from mmplan.scenario.formats.reading import Head, Reading, read_head
from mmplan.scenario.formats.rocm_topo import looks_like_rocm_topo, read_rocm_topo


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """`looks_like` sees the first 64 KB; `read` takes all files of one call, in their order."""

    what: str
    looks_like: Callable[[Head], bool]
    read: Callable[[Sequence[Path]], Reading]


# The first kind that recognises a file reads it, so those with the surest marks stand first.
KINDS: dict[str, Kind] = {
    "kineto": Kind(
        what="trace of the PyTorch profiler, one file per rank", looks_like=looks_like_kineto, read=read_kineto
    ),
    "hf": Kind(what="config.json of a Hugging Face model", looks_like=looks_like_hf_config, read=read_hf_configs),
    "rocm-topo": Kind(
        what="rocm-smi --showtopo or amd-smi topology", looks_like=looks_like_rocm_topo, read=read_rocm_topo
    ),
    "nvidia-topo": Kind(
        what="nvidia-smi topo -m, also of several hosts", looks_like=looks_like_nvidia_topo, read=read_nvidia_topo
    ),
    "hosts": Kind(what="Slurm host list or hostfile", looks_like=looks_like_hosts, read=read_hosts),
}


def read_files(words: Sequence[str]) -> Reading:
    """The reading of `KIND FILE...` or `FILE...`.

    Raises:
        InputError: no files, an unknown kind, files of several kinds or of none, or a file that its reader refuses.
    """
    named = words[0] if words[0] in KINDS else None
    if named is not None and Path(named).exists() and len(words) == 1:
        named = None  # a file that is called like a kind
    paths = [Path(word) for word in (words[1:] if named else words)]
    if not paths:
        raise InputError(f"expected files after '{named}'")
    return KINDS[named or _guess(paths)].read(paths)


def _guess(paths: Sequence[Path]) -> str:
    """The kind that all the files have."""
    kinds = {path: _kind_of(read_head(path)) for path in paths}
    for path, kind in kinds.items():
        if kind is None:
            hint = did_you_mean(str(path), KINDS) if path == paths[0] else ""
            raise InputError(f"not a kind of file that is known{hint}; name one of {listed(KINDS, 40)}", file=path)
    if len(set(kinds.values())) > 1:
        told = ", ".join(f"'{path}' is {kind}" for path, kind in kinds.items())
        raise InputError(f"expected files of one kind: {told}")
    return str(kinds[paths[0]])


def _kind_of(head: Head) -> str | None:
    return next((name for name, kind in KINDS.items() if kind.looks_like(head)), None)
