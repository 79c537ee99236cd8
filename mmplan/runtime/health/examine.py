"""Examines a checkpoint: are its weights numbers, and what do the monitors say of a few steps without an update.

The job (a Python file, as for `mmplan execute --job`) has `model()` and `batches(size)`; besides, for the doctor,

    health = {"modalities": {...}, "embeddings": {...}, ...}   # arguments of `attach`; default: names are guessed
    def encode_images(model, paths) -> Tensor: ...              # for --data: [n, d]
    def encode_texts(model, captions) -> Tensor: ...
"""

from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mmplan.errors import InputError
from mmplan.runtime.ghost.job import load_job, run_job_file
from mmplan.runtime.health import overflow
from mmplan.runtime.health.alignment import AlignmentResult, encode, measure_alignment
from mmplan.runtime.health.captions import CaptionSet
from mmplan.runtime.health.hooks import attach, loss_of
from mmplan.runtime.health.judge import Judge, Value
from mmplan.runtime.health.readings import Reading
from mmplan.runtime.health.rules import RULES
from mmplan.runtime.health.weights import load_weights, named_weights

STEPS, PASSES = 6, 2  # a monitor needs three readings in a row; two passes a step have a variance


def weight_readings(path: Path) -> list[Reading]:
    """Of weights that are no numbers; one healthy reading where all are.

    Raises:
        InputError: the checkpoint cannot be read.
    """
    judge = Judge(RULES, 0)
    rule = overflow.RULE.monitor
    found = [
        judge.reading(0, Value(rule, name, 1.0, {"because": "weights", "what": what}))
        for name, what in overflow.bad_weights(named_weights(path))
    ]
    return found or [judge.reading(0, Value(rule, "weights", 0.0))]


def probe_readings(path: Path, job_file: Path, size: int) -> list[Reading]:
    """Readings of a few forwards and backwards of the job's model with these weights, `size` samples each.

    Raises:
        InputError: the job or its model does not work, or does not fit the weights.
    """
    job = load_job(job_file)
    asked = run_job_file(job_file).get("health", {})
    if not isinstance(asked, Mapping):
        raise InputError(
            f"expected a dict of arguments of attach, found {type(asked).__name__}", file=job_file, key="health"
        )
    model = _filled(job.model, path, job_file)
    stream = islice(job.batches(size), STEPS * PASSES)
    try:
        with attach(model, **{**asked, "interval": 1, "warmup_steps": 0, "file": None, "averaged": True}) as health:
            for number, batch in enumerate(stream, start=1):
                loss = loss_of(model(**batch))
                if loss is None:
                    raise InputError("the forward returned no loss", file=job_file, key="model")
                if loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
                if number % PASSES == 0:
                    health.step()
                    model.zero_grad()
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"the model failed: {type(error).__name__}: {error}", file=job_file) from error
    if not health.readings:
        raise InputError(f"`batches` gave fewer than {PASSES} batches", file=job_file, key="batches")
    return health.readings


def checkpoint_alignment(path: Path, job_file: Path, data: CaptionSet) -> AlignmentResult:
    """The alignment protocol with the job's encoders and these weights.

    Raises:
        InputError: the job lacks encoders, or they fail.
    """
    names = run_job_file(job_file)
    for name in ("model", "encode_images", "encode_texts"):
        if not callable(names.get(name)):
            raise InputError(f"expected a function `{name}`, found none", file=job_file, key=name)
    model = _filled(names["model"], path, job_file).eval()

    def of(name: str) -> Callable[[Any], Tensor]:
        return lambda items: names[name](model, items)

    images, texts = encode(data, of("encode_images"), of("encode_texts"))
    return measure_alignment(images, texts, data)


def _filled(build: Callable[[], nn.Module], path: Path, job_file: Path) -> nn.Module:
    try:
        model = build()
    except Exception as error:
        raise InputError(f"`model` failed: {type(error).__name__}: {error}", file=job_file, key="model") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a module, found {type(model).__name__}", file=job_file, key="model")
    load_weights(model, path)
    return model
