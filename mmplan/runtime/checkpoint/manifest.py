"""manifest.json: what a checkpoint holds, and which part of which tensor lies in which file.

A checkpoint is a folder `step-00000010` with `manifest.json`, `plan.json`, `steps.json` (losses so far), a
`rank-00000.safetensors` of each rank, and `checksums.sha256` over all of them, which `sha256sum -c` reads.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from mmplan.runtime.numerics.loss_scale import LossScale

SCHEMA_VERSION = 1
MANIFEST, CHECKSUMS, PLAN, STEPS = "manifest.json", "checksums.sha256", "plan.json", "steps.json"


class SavedPiece(NamedTuple):
    """A box of a tensor in the file of a rank."""

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """A parameter of the whole model. `kinds`: its weight and, where it is trained, its moments."""

    shape: tuple[int, ...]
    kinds: tuple[str, ...]
    pieces: tuple[SavedPiece, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """`step`: optimizer steps done, and so the number of the next one; `samples`: how many the data had given by then.

    `updates`: steps that the moments have seen, None without moments. `loss_scales`: by modality, where losses are
    scaled. `job`: the model is the user's own. `files`:
    bytes by name, without this file and the checksums.
    """

    schema_version: int = SCHEMA_VERSION
    mmplan_version: str
    saved_at: str
    step: int
    samples: int
    updates: int | None
    ranks: int
    plan_hash: str
    job: bool
    files: dict[str, int]
    tensors: dict[str, SavedTensor]
    loss_scales: dict[str, LossScale] = field(default_factory=dict)

    def __post_init__(self) -> None:
        least = (self.step, self.samples, self.updates or 0, self.ranks - 1, *self.files.values())
        if min(least) < 0:
            raise ValueError("counts are negative")
        for name, tensor in self.tensors.items():
            for piece in tensor.pieces:
                ends = zip(piece.offset, piece.shape, strict=False)
                fits = len(piece.offset) == len(piece.shape) == len(tensor.shape) and all(
                    offset >= 0 and size > 0 and offset + size <= whole
                    for (offset, size), whole in zip(ends, tensor.shape, strict=True)
                )
                if not fits or part_name(piece.rank) not in self.files:
                    raise ValueError(f"a piece of '{name}' lies outside of it")

    @property
    def total_bytes(self) -> int:
        return sum(self.files.values())


_MANIFEST = TypeAdapter(Manifest)


def part_name(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


def manifest_json(manifest: Manifest) -> bytes:
    return _MANIFEST.dump_json(manifest) + b"\n"


def manifest_of(text: bytes) -> Manifest:
    """Read a manifest; ValueError says what is wrong with it."""
    try:
        manifest = _MANIFEST.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{MANIFEST} is no manifest: {key}: {first['msg']}") from error
    if manifest.schema_version != SCHEMA_VERSION:
        raise ValueError(f"{MANIFEST} has version {manifest.schema_version}, this mmplan reads {SCHEMA_VERSION}")
    return manifest
