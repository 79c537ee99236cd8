"""`mmplan import job`: a scenario of a job's own model, by running its forward without weights on its first batches."""

from collections.abc import Sequence
from pathlib import Path

import torch

from mmplan.errors import InputError
from mmplan.runtime.dtypes import TORCH_DTYPES
from mmplan.runtime.ghost.counting import Counting
from mmplan.runtime.ghost.job import Job, load_job, taken
from mmplan.runtime.ghost.laying import cast_batch
from mmplan.runtime.ghost.recorded_model import model_from_recordings
from mmplan.runtime.ghost.recording import Recorder
from mmplan.runtime.ghost.units import find_units
from mmplan.runtime.ghost.weightless import build_weightless
from mmplan.scenario.document import counted
from mmplan.scenario.formats.reading import Reading
from mmplan.scenario.scenario import Dtype, Model
from mmplan.scenario.schema_recorded import recorded_values

MOST_SAMPLES = 32  # that are recorded; a run looks at as many before it starts
ASSUMED_CLUSTER = {"device": "cpu-core", "nodes": 1, "devices_per_node": 4}
ASSUMED_BATCH = 8


def read_jobs(paths: Sequence[Path]) -> Reading:
    """The scenario of one job file, which is executed.

    Raises:
        InputError: several files, or one that is no job; its model gives no loss or reads what stages compute.
    """
    if len(paths) > 1:
        raise InputError(f"a scenario has one model: expected one job, found {counted(len(paths), 'file')}")
    model, precision = record_job(load_job(paths[0]))
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
            "constraints": {"tp": 1},
        },
        read=tuple(_told(model)),
        warnings=(
            f"no file says the batch and the cluster: batch.global {ASSUMED_BATCH} and four CPU cores are assumed",
            "constraints.tp is 1: a recording says what whole layers compute, and not what is left of them on ranks "
            "that share one; describe the model by hf_config for tp, cp and ep",
        ),
    )


def record_job(job: Job) -> tuple[Model, Dtype]:
    """The model of a job as it is recorded, and what its activations are made of."""
    model = build_weightless(job.model)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    batches = taken(job, iter(job.batches(1)), MOST_SAMPLES)
    recorder = Recorder(model, find_units(model), Counting(model, dtype))
    recordings = [recorder.record(cast_batch(batch, dtype)) for batch in batches]
    precisions: tuple[Dtype, ...] = ("fp32", "bf16", "fp16")
    precision: Dtype = next((name for name in precisions if TORCH_DTYPES[name] == dtype), "fp32")
    made = model_from_recordings(job.file.stem, model, recordings, len(batches), job.modalities)
    return made, precision


def _told(model: Model) -> list[str]:
    assert model.recorded is not None
    told = [f"{counted(model.recorded.samples, 'sample')} recorded; a plan counts every sample as their mean"]
    kinds = dict(model.recorded.kinds)
    for module in model.modules:
        own = [kinds[layer.kind] for layer in model.recorded.layers if layer.module == module.name]
        parameters, trained = sum(kind.parameters for kind in own), sum(kind.trained for kind in own)
        what = "all trained" if trained == parameters else f"{trained:,} trained"
        told.append(
            f"{module.name}: {module.modality}, {counted(len(own), 'layer')}, {parameters:,} parameters, {what}"
        )
    return told
