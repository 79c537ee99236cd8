"""The weights in a checkpoint of whatever kind: mmplan's own, safetensors or torch files."""

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from mmplan.errors import InputError
from mmplan.runtime.checkpoint.folder import Damaged, committed, read_manifest
from mmplan.runtime.checkpoint.manifest import MANIFEST, part_name
from mmplan.runtime.checkpoint.part import key_of
from mmplan.runtime.ghost.pretrained import Pretrained

_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_INSIDE = ("state_dict", "model_state_dict", "model", "module")  # where a saved dict keeps its weights
SUFFIXES = (".safetensors", *_TORCH)


def named_weights(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Weights by name, one at a time where the files allow.

    Raises:
        InputError: there are none, or they cannot be read without running code that is in them.
    """
    if path.is_dir() and (own := _own_checkpoint(path)) is not None:
        yield from _pieces(own)
        return
    files = [path] if path.is_file() else sorted(f for f in _children(path) if f.suffix in SUFFIXES)
    # Optimizers and arguments lie beside weights, under names of their own.
    tensors = [f for f in files if f.suffix == ".safetensors"] or [
        f for f in files if f.stem.startswith("pytorch_model")
    ]
    if not files:
        pickled = path.is_dir() and (path / ".metadata").is_file()
        raise InputError(
            "of torch.distributed.checkpoint, whose metadata is a pickle: convert it (dcp_to_torch_save)"
            if pickled
            else f"expected a checkpoint: files that end in {', '.join(SUFFIXES)}, or one that mmplan has written",
            file=path,
        )
    for file in tensors or files:
        yield from _safetensors(file) if file.suffix == ".safetensors" else _torch(file)


def load_weights(model: nn.Module, path: Path) -> None:
    """Fill a model.

    Raises:
        InputError: weights are missing or have other shapes.
    """
    if path.is_dir() and _own_checkpoint(path) is None and any(path.glob("*.safetensors")):
        saved = Pretrained(path, model)  # knows the older names of transformers
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(saved.value(name, parameter))
        return
    values = dict(named_weights(path))
    if values and all(name.startswith("module.") for name in values):
        values = {name.removeprefix("module."): value for name, value in values.items()}
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    with torch.no_grad():
        for names in aliases.values():
            found = next((name for name in names if name in values), None)
            parameter = model.get_parameter(names[0])
            if found is None:
                raise InputError(f"no tensor for the parameter '{names[0]}' of the model", file=path)
            if values[found].shape != parameter.shape:
                shapes = f"{tuple(values[found].shape)}, in the model {tuple(parameter.shape)}"
                raise InputError(f"'{found}' has shape {shapes}", file=path)
            parameter.copy_(values[found])
        for name, buffer in model.named_buffers():
            if name in values and values[name].shape == buffer.shape:
                buffer.copy_(values[name])


def _own_checkpoint(path: Path) -> Path | None:
    """A checkpoint of mmplan: this folder, or the newest in it."""
    if (path / MANIFEST).is_file():
        return path
    return next(iter(committed(path)), None)


def _pieces(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """Weights of a run of mmplan, put together from the boxes that its ranks have written."""
    try:
        manifest = read_manifest(checkpoint)
        opened: dict[int, Any] = {}
        for name, tensor in manifest.tensors.items():
            kind = "weight" if "weight" in tensor.kinds else tensor.kinds[0]
            whole: Tensor | None = None
            for piece in tensor.pieces:
                if piece.rank not in opened:
                    file = checkpoint / part_name(piece.rank)
                    opened[piece.rank] = safe_open(file, framework="pt")
                part = opened[piece.rank].get_tensor(key_of(name, kind, piece.offset))
                whole = torch.empty(tensor.shape, dtype=part.dtype) if whole is None else whole
                whole[tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.shape, strict=True))] = part
            if whole is not None:
                yield name, whole
    except (Damaged, SafetensorError, OSError, RuntimeError) as error:
        raise InputError(f"the checkpoint is damaged: {error}", file=checkpoint) from error


def _safetensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                yield key, opened.get_tensor(key)
    except (SafetensorError, OSError) as error:
        raise InputError(f"cannot be read as safetensors: {error}", file=file) from error


def _torch(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        found: Any = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split())[:160]
        raise InputError(f"cannot be read as weights alone: {reason}", file=file) from error
    for key in _INSIDE:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not any(isinstance(value, Tensor) for value in found.values()):
        raise InputError("expected tensors by name, found none", file=file)
    yield from ((str(name), value) for name, value in found.items() if isinstance(value, Tensor))


def _children(path: Path) -> list[Path]:
    if not path.exists():
        raise InputError("no such file or folder", file=path)
    try:
        return list(path.iterdir())
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=path) from error
