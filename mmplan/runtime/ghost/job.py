"""A user's own training job: a Python file with the model and the data.

    def model() -> torch.nn.Module: ...            # any module whose forward returns a loss
    def batches(size: int) -> Iterable[dict]: ...  # arguments of that forward, `size` samples each
    def weight(batch: dict) -> float: ...          # optional: what its loss counts in the mean over a step
    modalities = {"tower": "vision"}               # optional: of modules, for `mmplan import job`; else by their names

With a parameter `start`, `batches(size, start=N)` gives what follows the first N batches; a run that goes on then skips
them without making them.

With a manifest (`execute --data FILE`) a job has, instead of `batches`,

    def collate(rows: list[dict]) -> dict: ...     # arguments of the forward, of so many rows of the manifest

All processes call these and must get the same. Without `weight`, a batch counts by its labels: those of `labels` that
are not -100, without the first of each sequence where `labels` and `input_ids` have one shape, because there the model
shifts them.
"""

import inspect
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from torch import Tensor, nn

from mmplan.errors import InputError
from mmplan.runtime.ghost.manifest import manifest_batches, read_rows
from mmplan.runtime.ghost.recording import Batch
from mmplan.scenario.document import listed
from mmplan.scenario.scenario import Modality

NO_LABEL = -100


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    file: Path
    model: Callable[[], nn.Module]
    batches: Callable[..., Iterable[Batch]]
    weight: Callable[[Batch], float]
    modalities: Mapping[str, Modality] = field(default_factory=dict)

    @property
    def starts(self) -> bool:
        """Whether `batches` can begin behind the first ones."""
        try:
            return "start" in inspect.signature(self.batches).parameters
        except (TypeError, ValueError):
            return False


def load_job(file: Path, data: Path | None = None) -> Job:
    """Run the file as `python FILE` would, modules beside it included, and take its functions.

    Args:
        data: a manifest, whose rows the job's `collate` makes batches of (`manifest.py`).

    Raises:
        InputError: the file cannot be run, or lacks `model`, or `batches` or `collate`; the manifest is none.
    """
    found = functions_of(file, "model", "batches" if data is None else "collate")
    batches = found["batches"] if data is None else manifest_batches(read_rows(data), found["collate"])
    return Job(
        file=file,
        model=found["model"],
        batches=batches,
        weight=found.get("weight", count_labels),
        modalities=_modalities(found.get("modalities", {}), file),
    )


def _modalities(value: object, file: Path) -> dict[str, Modality]:
    """InputError where it is no mapping of names to modalities."""
    known = get_args(Modality)
    if not isinstance(value, Mapping) or not all(modality in known for modality in value.values()):
        raise InputError(f"expected names of modules, each with one of {listed(known)}", file=file, key="modalities")
    return {str(name): modality for name, modality in value.items()}


def with_data(job: Job, file: Path) -> Job:
    """The job with `batches`, and `weight` where it has one, of another file."""
    found = functions_of(file, "batches")
    return replace(job, file=file, batches=found["batches"], weight=found.get("weight", job.weight))


def functions_of(file: Path, *names: str) -> dict[str, Any]:
    """What the file defines, by name, these functions among it."""
    found = run_job_file(file)
    for name in names:
        if not callable(found.get(name)):
            raise InputError(f"expected a function `{name}`, found none", file=file, key=name)
    return found


def taken(job: Job, stream: Iterator[Any], count: int) -> list[Batch]:
    """The first batches of a job.

    Raises:
        InputError: there are none, or they are no arguments of a forward.
    """
    first = list(islice(stream, count))
    if not first:
        raise InputError("`batches` gave no batch", file=job.file, key="batches")
    wrong = [type(batch).__name__ for batch in first if not isinstance(batch, Mapping)]
    if wrong:
        raise InputError(f"expected dicts of the forward's arguments, found {wrong[0]}", file=job.file, key="batches")
    return first


def run_job_file(file: Path) -> dict[str, Any]:
    """What the file defines, by name.

    Raises:
        InputError: there is none, or it cannot be run.
    """
    if not file.is_file():
        raise InputError("no such file", file=file)
    sys.path.insert(0, str(file.resolve().parent))
    try:
        return runpy.run_path(str(file))
    except Exception as error:
        raise InputError(f"the job could not be loaded: {type(error).__name__}: {error}", file=file) from error


def count_labels(batch: Batch) -> float:
    """Labels that the loss of a batch is the mean of; 1 without labels."""
    labels, ids = batch.get("labels"), batch.get("input_ids")
    if not isinstance(labels, Tensor):
        return 1.0
    shifted = isinstance(ids, Tensor) and ids.shape == labels.shape
    return float((labels[..., 1:] if shifted else labels).ne(NO_LABEL).sum())
