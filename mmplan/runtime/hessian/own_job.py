"""A user's own model and data as a subject, its modules laid onto the scenario's layers as `execute --job` does.

The model is the one that `model()` returns, with the weights it has: those it loads itself, those of `--weights`, or
random ones. Which modalities a batch has is read off a recording of its forward: a modality is there when the loss
depends on a module of a layer of it. With one sample in a forward these are the modalities of the sample; with several,
of any of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import parameters
from mmplan.cost_models.graph import ComputationGraph
from mmplan.errors import InputError, MmplanError
from mmplan.runtime.ghost.alignment import align, used_pieces
from mmplan.runtime.ghost.job import Job
from mmplan.runtime.ghost.laying import cast_batch
from mmplan.runtime.ghost.model import saved_buffers
from mmplan.runtime.ghost.pretrained import Pretrained
from mmplan.runtime.ghost.recording import Batch, Recorder, loss_of
from mmplan.runtime.ghost.train import FIRST_BATCHES
from mmplan.runtime.ghost.units import find_units, parameter_names
from mmplan.runtime.ghost.weightless import build_weightless
from mmplan.runtime.hessian.saved import is_checkpoint, saved_weights
from mmplan.runtime.hessian.subject import Outputs, Piece, Subject, own_parameters, reaching_modalities, require_memory
from mmplan.scenario.scenario import Scenario

_LOSS = "loss"  # a job has one


def job_subject(
    scenario: Scenario, job: Job, *, weights: Path | None, samples: int, microbatch: int | None, device: torch.device
) -> Subject:
    """Batches are consecutive ones of the job's.

    Args:
        weights: safetensors as the model's library saves them, or a checkpoint of `execute --job`.
        microbatch: samples that `batches` is asked for at a time; None: 1.

    Raises:
        InputError: the job cannot be run, its model does not fit the scenario's layers, or `batches` ends too early.
    """
    graph, size = build_graph(scenario), 1 if microbatch is None else microbatch
    require_memory(sum(parameters(layer) for layer in graph.layers()), device)
    if samples % size:
        raise InputError(f"a batch of {samples} samples is no whole number of forwards of {size} samples")
    stream = _Stream(job, size)
    first = stream.first()
    bare = _built(job, weightless=True)
    _refuse_split(bare, job)
    for parameter in bare.parameters():
        parameter.data = parameter.data.float()
    recorder = Recorder(bare, find_units(bare))
    layer_of = align(graph, bare, [recorder.record(cast_batch(batch, torch.float32)) for batch in first])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(scenario.seed)
        model = _built(job)
    if weights is not None:
        _load(model, weights)
    frozen = _frozen(model, layer_of, graph)
    model.to(device, torch.float32).eval()
    names = {parameter: name for name, parameter in model.named_parameters()}
    pieces = {layer.id: [piece for piece, at in layer_of.items() if at == layer.id] for layer in graph.layers()}

    def batch(number: int) -> list[Piece]:
        found = []
        for taken in stream.take(number * (samples // size), samples // size):
            weight = job.weight(taken)
            if not weight > 0:  # nothing of it counts, and its mean may be no number
                continue
            own = cast_batch(taken, torch.float32)
            used = used_pieces([recorder.record(own)])
            modalities = frozenset(graph.layer(layer_of[piece]).modality for piece in used if piece in layer_of)
            run = partial(_run, model, own, weight, device)
            found.append(Piece(run=run, targets={_LOSS: weight}, modalities=modalities))
        return found

    return Subject(
        model=model,
        layers=own_parameters(
            {
                layer: [model.get_parameter(name) for piece in own for name in parameter_names(model, piece)]
                for layer, own in pieces.items()
            }
        ),
        names=names,
        frozen=frozen,
        branches=reaching_modalities(graph),
        batch=batch,
        source=f"batches of {job.file.name}",
        device=device,
    )


class _Stream:
    """What `batches` gives, from any place: what lies before is drawn and left, or skipped by the job itself."""

    def __init__(self, job: Job, size: int) -> None:
        self._job, self._size, self._place = job, size, 0
        self._rest: Iterator[Batch] = self._begin(0)

    def first(self) -> list[Batch]:
        """The first ones, which stay to be taken.

        Raises:
            InputError: there is none, or it is no mapping.
        """
        first = list(islice(self._rest, FIRST_BATCHES))
        if not first:
            raise InputError("`batches` gave no batch", file=self._job.file, key="batches")
        wrong = [type(batch).__name__ for batch in first if not isinstance(batch, Mapping)]
        if wrong:
            raise InputError(
                f"expected dicts of the forward's arguments, found {wrong[0]}", file=self._job.file, key="batches"
            )
        self._rest = chain(first, self._rest)
        return first

    def take(self, place: int, count: int) -> list[Batch]:
        """`count` batches from number `place` on.

        Raises:
            InputError: the data has ended.
        """
        if place < self._place:
            self._rest, self._place = self._begin(0), 0
        if self._job.starts and place > self._place:
            self._rest = self._begin(place)
        else:
            next(islice(self._rest, place - self._place, place - self._place), None)
        taken = list(islice(self._rest, count))
        self._place = place + count
        if len(taken) < count:
            raise InputError(
                f"`batches` ended after {place + len(taken):,}, and batches {place + 1:,} to {place + count:,} were "
                "asked for: seeds x batches x samples / microbatch forwards are taken, lower one of these",
                file=self._job.file,
                key="batches",
            )
        return taken

    def _begin(self, place: int) -> Iterator[Batch]:
        job, options = self._job, {"start": place} if place else {}
        try:
            yield from job.batches(self._size, **options)
        except MmplanError:
            raise
        except Exception as error:
            raise InputError(
                f"`batches` failed: {type(error).__name__}: {error}", file=job.file, key="batches"
            ) from error


def _built(job: Job, *, weightless: bool = False) -> nn.Module:
    try:
        return build_weightless(job.model) if weightless else job.model()
    except Exception as error:
        raise InputError(f"`model` failed: {type(error).__name__}: {error}", file=job.file, key="model") from error


def _refuse_split(model: nn.Module, job: Job) -> None:
    """A layer's eigenvalue is that of the whole layer."""
    split = next((name for name, p in model.named_parameters() if hasattr(p, "device_mesh")), None)
    if split is not None:
        raise InputError(
            f"`model` splits '{split}' over ranks (DTensor), and sensitivity measures whole layers: return the model "
            "before parallelize_module or fully_shard; --local N or torchrun shares the batches over processes",
            file=job.file,
            key="model",
        )


def _run(model: nn.Module, batch: Batch, weight: float, device: torch.device) -> Outputs:
    result = model(**{key: tree_map(partial(_moved, device), value) for key, value in batch.items()})
    logits = result.get("logits") if isinstance(result, Mapping) else getattr(result, "logits", None)
    shown = {_LOSS: logits} if isinstance(logits, Tensor) else None
    return Outputs(losses={_LOSS: loss_of(result).float() * weight}, logits=shown)


def _moved(device: torch.device, leaf: Any) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf


def _load(model: nn.Module, folder: Path) -> None:
    if is_checkpoint(folder):
        saved = saved_weights(folder, job=True)
        _fill(model, lambda name, like: saved[name] if name in saved else _missing(name, folder), saved.get)
    else:
        pretrained = Pretrained(folder, model)
        _fill(model, pretrained.value, pretrained.buffer)


def _fill(model: nn.Module, value: Callable[[str, Tensor], Tensor], buffer: Callable[[str], Tensor | None]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(value(name, parameter))
        for name, tensor in saved_buffers(model).items():
            found = buffer(name)
            if found is not None:
                tensor.copy_(found)


def _missing(name: str, folder: Path) -> Tensor:
    raise InputError(f"the checkpoint has nothing of the model's '{name}'", file=folder)


def _frozen(model: nn.Module, layer_of: Mapping[str, str], graph: ComputationGraph) -> frozenset[str]:
    """Layers that the scenario freezes, or the model itself."""
    trained = set()
    for piece, layer in layer_of.items():
        own: Sequence[nn.Parameter] = [model.get_parameter(name) for name in parameter_names(model, piece)]
        if graph.layer(layer).trainable and any(parameter.requires_grad for parameter in own):
            trained.add(layer)
    return frozenset(layer.id for layer in graph.layers() if layer.id not in trained)
