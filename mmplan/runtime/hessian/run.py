"""One measurement from files to result: load, estimate, measure, summarise. The same in every process."""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import nn

from mmplan import __version__
from mmplan.errors import InputError
from mmplan.runtime.ghost.job import load_job, with_data
from mmplan.runtime.hessian.measure import OnValue, curvature_of, measure, wanted_layers, weights_digest
from mmplan.runtime.hessian.own_job import job_subject
from mmplan.runtime.hessian.own_scenario import scenario_subject
from mmplan.runtime.hessian.products import targets_of
from mmplan.runtime.hessian.result import Measured, measured
from mmplan.runtime.hessian.settings import Question, Settings
from mmplan.runtime.hessian.subject import Subject
from mmplan.runtime.hessian.told import Estimate
from mmplan.runtime.hessian.values import Identity, Key, Values, values_of
from mmplan.scenario.document import read_document
from mmplan.scenario.layer_ids import layers_named, module_layer_ids
from mmplan.scenario.load import scenario_of
from mmplan.scenario.scenario import Scenario

OnNote = Callable[[str], None]

_SCENARIO = TypeAdapter(Scenario)
_OF_ZONES = ("no_split", "sensitivity", "percentile", "forbid")

USUAL_ITERATIONS = 10  # of a block of a trained model


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prepared:
    """What is measured, and what is known of it already."""

    question: Question
    settings: Settings  # with its layers as ids
    scenario: Scenario
    subject: Subject
    layers: Mapping[str, tuple[nn.Parameter, ...]]
    values: Values

    def total(self) -> int:
        """Values to measure, if every batch has every modality."""
        branches = sum(len(self.subject.branches[layer]) for layer in self.layers)
        return self.settings.seeds * self.settings.batches * branches

    def left(self) -> int:
        return self.total() - len(self.values.known)


def prepare(question: Question, device: torch.device, note: OnNote) -> Prepared:
    """Load everything.

    Raises:
        InputError: a file is wrong, or the unfinished measurement that is there is another one.
    """
    scenario = scenario_for(question.scenario, None if question.job is not None else question.data)
    settings = replace(question.settings, layers=_layer_ids(question.settings.layers, scenario))
    options: dict[str, Any] = {
        "weights": question.weights,
        "samples": settings.samples,
        "microbatch": settings.microbatch,
        "device": device,
    }
    if question.job is None:
        subject = scenario_subject(scenario, **options)
    else:
        job = load_job(question.job)
        job = job if question.data is None else with_data(job, question.data)
        subject = job_subject(scenario, job, **options)
    if dist.is_initialized():  # a model that draws its weights may do so otherwise in each process
        for tensor in (*subject.model.parameters(), *subject.model.buffers()):
            dist.broadcast(tensor.detach(), src=0)
    layers = wanted_layers(subject, settings)
    identity = Identity(
        weights=weights_digest(subject),
        parameters=sum(parameter.numel() for parameter in subject.model.parameters()),
        scenario=_digest(scenario),
        data=_data_digest(question),
        settings=_comparable(settings),
    )
    values = _shared_values(question, identity, note)
    return Prepared(
        question=question, settings=settings, scenario=scenario, subject=subject, layers=layers, values=values
    )


def estimate(prepared: Prepared) -> Estimate:
    """Time one product, of the first layer on the first batch. Collective."""
    settings, subject = prepared.settings, prepared.subject
    batch = subject.batch(0)
    found = {
        layer: [piece for piece in batch if set(piece.modalities) & set(subject.branches[layer])]
        for layer in prepared.layers
    }
    layer = next((layer for layer, own in found.items() if any(targets_of(own).values())), next(iter(found)))
    pieces = found[layer]
    world = dist.get_world_size() if dist.is_initialized() else 1
    most = min(settings.iterations, max(p.numel() for own in prepared.layers.values() for p in own)) + settings.trace
    usual = min(settings.iterations, USUAL_ITERATIONS) + settings.trace
    of_values = [sum(m in piece.modalities for piece in batch) for la in found for m in subject.branches[la]]
    mean = sum(of_values) / len(of_values) / world  # forwards of a value
    forwards = round(prepared.left() * mean * (1 + usual if settings.recompute else 1))
    if not any(targets_of(pieces).values()) or not prepared.left():
        value_s = product_s = 0.0
    else:
        started_s = time.perf_counter()
        with curvature_of(subject, prepared.layers[layer], pieces, settings, Key(0, "any", layer)) as matrix:
            vector = torch.ones(matrix.size, device=subject.device)
            built_s = time.perf_counter() - started_s
            matrix(vector)
            started_s = time.perf_counter()
            float(matrix(vector).sum())
        value_s, product_s = built_s, time.perf_counter() - started_s
    return Estimate(
        values=prepared.left(), usual=usual, most=most, forwards=forwards, value_s=value_s, product_s=product_s
    )


def finish(prepared: Prepared, on_value: OnValue) -> Measured:
    """Measure what is left and summarise. What was measured stays in the partial file if this is interrupted."""
    try:
        measure(prepared.subject, prepared.layers, prepared.settings, prepared.values, on_value)
    finally:
        prepared.values.write()
    sizes = {layer: sum(parameter.numel() for parameter in own) for layer, own in prepared.layers.items()}
    if not prepared.values.known:
        raise InputError("no batch has a target that a loss is computed of: nothing could be measured")
    return measured(
        prepared.values.known,
        prepared.settings,
        prepared.scenario.model,
        sizes,
        prepared.subject.frozen,
        _source(prepared),
    )


def scenario_for(path: Path, manifest: Path | None) -> Scenario:
    """The scenario of a file without its zones, whose file may be what is to be made; with the samples of another
    manifest if one is given."""
    document = read_document(path)
    constraints = document.values.get("constraints")
    if isinstance(constraints, dict):
        kept = {key: value for key, value in constraints.items() if key not in _OF_ZONES}
        document = replace(document, values={**document.values, "constraints": kept})
    if manifest is not None:
        if not manifest.is_file():
            raise InputError("no such file", file=manifest)
        values = {**document.values, "data": {"manifest": str(manifest.resolve())}}
        document = replace(document, values=values)
    return scenario_of(document)


def _layer_ids(texts: tuple[str, ...], scenario: Scenario) -> tuple[str, ...]:
    names = {module.name: module_layer_ids(module) for module in scenario.model.modules}
    ids: dict[str, None] = {}
    for text in texts:
        try:
            found = layers_named(text, names)
        except ValueError as error:
            raise InputError(f"--layers: {error}") from None
        ids |= dict.fromkeys(one for one in found if text not in names or not one.endswith(".loss"))
    return tuple(ids)


def _comparable(settings: Settings) -> dict[str, Any]:
    """Settings that decide about a value, as JSON gives them back; the rule is applied to finished values."""
    chosen = {**dataclasses.asdict(settings), "layers": list(settings.layers)}
    return {name: value for name, value in chosen.items() if name not in ("rule", "recompute")}


def _digest(scenario: Scenario) -> str:
    kept = _SCENARIO.dump_json(scenario, include={"model", "data", "seed"})
    return hashlib.sha256(kept).hexdigest()


def _data_digest(question: Question) -> str:
    """Of the job's file and that of its data, which say what comes."""
    files = [path for path in (question.job, question.data) if path is not None]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _shared_values(question: Question, identity: Identity, note: OnNote) -> Values:
    """The first process reads the partial file and tells the others, which keep none."""
    if not dist.is_initialized():
        return values_of(question.partial, identity, restart=question.restart, note=note)
    told: list[Any] = [None]
    own = None
    if dist.get_rank() == 0:
        try:
            own = values_of(question.partial, identity, restart=question.restart, note=note)
            told = [dict(own.known)]
        except InputError as error:
            told = [error]
    dist.broadcast_object_list(told, src=0)
    if isinstance(told[0], InputError):
        raise told[0]
    return own if own is not None else Values(identity=identity, path=None, known=told[0])


def _source(prepared: Prepared) -> dict[str, Any]:
    question, settings, identity = prepared.question, prepared.settings, prepared.values.identity
    files = {"job": question.job, "weights": question.weights, "data": question.data}
    return {
        "scenario": prepared.scenario.name,
        **{key: path.name for key, path in files.items() if path is not None},
        "samples_from": prepared.subject.source,
        "weights_sha256": identity.weights,
        "scenario_sha256": identity.scenario,
        "parameters": identity.parameters,
        "matrix": "Gauss-Newton" if settings.gauss_newton else "Hessian",
        "value": "largest eigenvalue, with its sign; mean over batches with a 95 % interval",
        **_comparable(settings),
        "mmplan": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(prepared.subject.device)
        if prepared.subject.device.type == "cuda"
        else "cpu",
    }
