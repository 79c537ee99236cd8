"""The file of one rank in a checkpoint: safetensors, written with its checksum on the way, read slice by slice."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mmplan.runtime.checkpoint.boxes import Box

# Of the format's description (github.com/huggingface/safetensors, README "Format").
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8  # of the tensors behind the header


def key_of(name: str, kind: str, offset: tuple[int, ...]) -> str:
    """Under which a piece of a tensor stands in the file."""
    return f"{name}:{kind}@{','.join(map(str, offset))}"


def write_part(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write contiguous tensors in host memory; returns bytes and SHA-256. Torch and Python are free meanwhile.

    Raises:
        OSError: the file cannot be written.
    """
    # Widest first, so that every tensor is aligned to its own type.
    order = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, object] = {}
    first = 0
    for key, tensor in order:
        end = first + tensor.nbytes
        header[key] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [first, end]}
        first = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        head = len(text).to_bytes(8, "little") + text
        for content in (memoryview(head), *(_bytes(tensor) for _, tensor in order)):
            file.write(content)
            digest.update(content)
            size += len(content)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def read_box(file: object, key: str, saved: Box, wanted: Box) -> Tensor:
    """A box of the tensor that holds `saved`.

    Args:
        file: an opened `safetensors.safe_open`.
    """
    if wanted == saved:
        tensor: Tensor = file.get_tensor(key)  # type: ignore[attr-defined]
        return tensor
    part: Tensor = file.get_slice(key)[wanted.within(saved)]  # type: ignore[attr-defined]
    return part


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
