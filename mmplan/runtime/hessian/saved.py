"""Weights out of a checkpoint of `mmplan execute`, whole again whatever plan wrote them, by parameter name."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mmplan.errors import InputError
from mmplan.runtime.checkpoint.boxes import Box, whole
from mmplan.runtime.checkpoint.folder import Damaged, committed, read_manifest, require_whole
from mmplan.runtime.checkpoint.manifest import MANIFEST, Manifest, SavedTensor, part_name
from mmplan.runtime.checkpoint.part import key_of
from mmplan.runtime.checkpoint.pieces import BUFFER
from mmplan.runtime.optimizer import WEIGHT


def is_checkpoint(folder: Path) -> bool:
    """Whether it is a checkpoint, or a folder of some."""
    return (folder / MANIFEST).is_file() or bool(folder.is_dir() and committed(folder))


def saved_weights(folder: Path, *, job: bool) -> dict[str, Tensor]:
    """Weights and buffers of the newest whole checkpoint in a folder, or of the one that it is.

    Args:
        job: of a model of the user's own, not of the scenario's.

    Raises:
        InputError: there is none, none is whole, or it is of the other kind of model.
    """
    if not folder.is_dir():
        raise InputError("no such folder", file=folder)
    damaged = []
    for path in [folder] if (folder / MANIFEST).is_file() else committed(folder):
        try:
            manifest = read_manifest(path)
            require_whole(path, manifest, sorted(manifest.files))
        except Damaged as error:
            damaged.append(f"{path.name}: {error}")
            continue
        if manifest.job != job:
            kinds = {True: "a job's model", False: "the scenario's own model"}
            hint = "leave --job out" if job else "give --job too"
            raise InputError(f"the checkpoint is of {kinds[manifest.job]}, not of {kinds[job]}: {hint}", file=path)
        return _tensors(path, manifest)
    raise InputError(f"no checkpoint is whole: {'; '.join(damaged)}" if damaged else "no checkpoint there", file=folder)


def _tensors(path: Path, manifest: Manifest) -> dict[str, Tensor]:
    try:
        return {name: _joined(path, name, saved) for name, saved in manifest.tensors.items()}
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot be read: {error}", file=path) from error


def _joined(path: Path, name: str, saved: SavedTensor) -> Tensor:
    """All pieces of a tensor, which cover it."""
    kind = BUFFER if BUFFER in saved.kinds else WEIGHT
    result: Tensor | None = None
    for rank, offset, shape in saved.pieces:
        with safe_open(path / part_name(rank), framework="pt") as file:
            part = file.get_tensor(key_of(name, kind, offset))
        result = torch.empty(saved.shape, dtype=part.dtype) if result is None else result
        result[Box(offset, shape).within(whole(saved.shape))] = part
    assert result is not None, "a manifest names no tensor without pieces"
    return result
