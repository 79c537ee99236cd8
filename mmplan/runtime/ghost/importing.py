"""`mmplan import job`: a scenario of a job's own model, by running its forward without weights on its first batches."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from mmplan.errors import InputError
from mmplan.runtime.dtypes import TORCH_DTYPES
from mmplan.runtime.ghost.counting import Counting
from mmplan.runtime.ghost.job import Job, load_job, taken
from mmplan.runtime.ghost.laying import cast_batch
from mmplan.runtime.ghost.recorded_model import model_from_recordings
from mmplan.runtime.ghost.recording import Batch, Recorder
from mmplan.runtime.ghost.shared_blocks import SharedBlock, ask_splits, is_large, shared_blocks
from mmplan.runtime.ghost.units import find_units
from mmplan.runtime.ghost.weightless import build_weightless
from mmplan.scenario.document import counted
from mmplan.scenario.formats.reading import Reading
from mmplan.scenario.scenario import Dtype, Model
from mmplan.scenario.schema_recorded import recorded_values

MOST_SAMPLES = 32  # that are recorded; a run looks at as many before it starts
ASSUMED_CLUSTER = {"device": "cpu-core", "nodes": 1, "devices_per_node": 4}
ASSUMED_BATCH = 8
TP_DEGREES = (2, 4, 8)  # that are tried: what nodes of eight devices have


def read_jobs(paths: Sequence[Path]) -> Reading:
    """The scenario of one job file, which is executed.

    Raises:
        InputError: several files, or one that is no job; its model gives no loss or reads what stages compute.
    """
    if len(paths) > 1:
        raise InputError(f"a scenario has one model: expected one job, found {counted(len(paths), 'file')}")
    notes: list[str] = []
    model, precision = record_job(load_job(paths[0]), notes.append)
    assert model.recorded is not None
    frozen = [module.name for module in model.modules if module.training.mode == "frozen"]
    return Reading(
        kind="job",
        document="scenario",
        fragment={
            "name": model.name,
            "model": {"recorded": recorded_values(model)},
            **({"train": dict.fromkeys(frozen, "frozen")} if frozen else {}),
            "batch": {"global": ASSUMED_BATCH},
            "precision": precision,
            "cluster": ASSUMED_CLUSTER,
        },
        read=tuple(_told(model)),
        warnings=(
            f"no file says the batch and the cluster: batch.global {ASSUMED_BATCH} and four CPU cores are assumed",
            "a recording does not say what is left of a layer on ranks that share rows or experts: describe the model "
            "by hf_config for cp and ep",
            *notes,
        ),
    )


def record_job(job: Job, note: Callable[[str], None] = lambda text: None) -> tuple[Model, Dtype]:
    """The model of a job as it is recorded, and what its activations are made of. Args: note: is told why its layers
    cannot be shared."""
    model = build_weightless(job.model)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    batches = [cast_batch(batch, dtype) for batch in taken(job, iter(job.batches(1)), MOST_SAMPLES)]
    try:
        shared = blocks_on_ranks(model, batches, TP_DEGREES, note)
    except InputError as error:
        note(f"tp is 1: {error}")
        shared = {}
    recorder = Recorder(model, find_units(model), Counting(model, dtype, shared))
    recordings = [recorder.record(batch) for batch in batches]
    precisions: tuple[Dtype, ...] = ("fp32", "bf16", "fp16")
    precision: Dtype = next((name for name in precisions if TORCH_DTYPES[name] == dtype), "fp32")
    made = model_from_recordings(job.file.stem, model, recordings, len(batches), job.modalities, shared)
    return made, precision


def blocks_on_ranks(
    model: nn.Module, batches: Sequence[Batch], degrees: Sequence[int], note: Callable[[str], None] = lambda text: None
) -> dict[int, dict[str, SharedBlock]]:
    """By these degrees of tensor parallelism, units that so many ranks can share, as one of them has them.

    Args:
        note: is told where shapes alone say so.

    Raises:
        InputError: a block draws random numbers.
    """
    units = find_units(model)
    recorder = Recorder(model, units)
    for batch in batches if degrees else ():
        recorder.record(batch)
        if all(recorder.form(name) in recorder.arguments for name in units):
            break  # a trial takes the first call of each form
    found = {degree: ask_splits(recorder, [*units], degree).splits for degree in degrees}
    shared = {name for splits in found.values() for name in splits}
    if large := [name for name in units if name in shared and is_large(units[name])]:
        note(
            f"{counted(len(large), 'module')} such as '{large[0]}' are too large to be tried on numbers here: tp "
            "shares what the shapes of a rank's part allow; `mmplan check PLAN --job` tries them"
        )
    return {degree: shared_blocks(model, splits, degree) for degree, splits in found.items() if splits}


def _told(model: Model) -> list[str]:
    assert model.recorded is not None
    told = [f"{counted(model.recorded.samples, 'sample')} recorded; a plan counts every sample as their mean"]
    kinds = dict(model.recorded.kinds)
    told += [_told_shared(model, tp) for tp in model.recorded.tp_degrees]
    for module in model.modules:
        own = [kinds[layer.kind] for layer in model.recorded.layers if layer.module == module.name]
        parameters, trained = sum(kind.parameters for kind in own), sum(kind.trained for kind in own)
        what = "all trained" if trained == parameters else f"{trained:,} trained"
        told.append(
            f"{module.name}: {module.modality}, {counted(len(own), 'layer')}, {parameters:,} parameters, {what}"
        )
    return told


def _told_shared(model: Model, tp: int) -> str:
    assert model.recorded is not None
    shared = {name for name, kind in model.recorded.kinds if any(one.tp == tp for one in kind.on_ranks)}
    count = sum(layer.kind in shared for layer in model.recorded.layers)
    return f"tp {tp}: ranks share {count} of {counted(len(model.recorded.layers), 'layer')}; each has the others whole"
