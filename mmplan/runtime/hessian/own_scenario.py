"""The scenario's own model and data as a subject: weights as `execute` starts with, or of its checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import parameters
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.loads import audio_clip_frames, image_patch_counts, own_tokens, sample_loads
from mmplan.errors import InputError
from mmplan.runtime.batch import Microbatch, make_microbatch
from mmplan.runtime.hessian.saved import saved_weights
from mmplan.runtime.hessian.subject import Outputs, Piece, Subject, own_parameters, reaching_modalities, require_memory
from mmplan.runtime.model import MultimodalModel
from mmplan.runtime.requirements import refuse_forms
from mmplan.runtime.tensor_parallel import places_of
from mmplan.scenario.samples import draw_samples
from mmplan.scenario.scenario import Sample, Scenario


def scenario_subject(
    scenario: Scenario, *, weights: Path | None, samples: int, microbatch: int | None, device: torch.device
) -> Subject:
    """Batches are consecutive samples of the scenario's data, as `execute` draws them.

    Args:
        weights: a checkpoint of `execute`, or a folder of them; None: weights are drawn.
        microbatch: samples of one forward; None: all of a batch that have the same modalities.

    Raises:
        InputError: the model is not built by this release, or the checkpoint is of another one.
    """
    refuse_forms(scenario)
    scenario = _in_fp32(scenario)
    graph = build_graph(scenario)
    require_memory(sum(parameters(layer) for layer in graph.layers()), device)
    model = MultimodalModel(graph.layers(), graph, precision="fp32", seed=scenario.seed, device=device)
    if weights is not None:
        _load(model, graph, saved_weights(weights, job=False), weights)
    logits = _Logits(model, graph)
    size = samples if microbatch is None else microbatch
    raw = frozenset(layer.module for layer in graph.layers() if not layer.sources or layer.kind == "token_embed")
    modules: dict[str, Sequence[nn.Parameter]] = {
        layer.id: list(model.layer(layer.id).parameters()) for layer in graph.layers()
    }

    def batch(number: int) -> list[Piece]:
        drawn = draw_samples(scenario.data, scenario.seed, number * samples, samples)
        alike: dict[frozenset[str], list[int]] = {}
        for index, sample in enumerate(drawn):
            alike.setdefault(sample_modalities(scenario, sample), []).append(index)
        return [
            _piece(scenario, drawn, group[first : first + size], number * samples, modalities)
            for modalities, group in alike.items()
            for first in range(0, len(group), size)
        ]

    def _piece(
        scenario: Scenario, drawn: Sequence[Sample], group: Sequence[int], first: int, modalities: frozenset[str]
    ) -> Piece:
        own = [drawn[index] for index in group]
        targets = {name: load.targets for name, load in sample_loads(scenario, own).items() if load.targets}
        made = partial(
            make_microbatch,
            scenario,
            own,
            indices=[first + index for index in group],
            targets_in_batch=dict.fromkeys((module.name for module in scenario.model.modules), 1),
            raw_modules=raw,
            dtype=torch.float32,
            device=device,
        )
        return Piece(run=partial(_run, model, logits, made), targets=targets, modalities=modalities)

    return Subject(
        model=model,
        layers=own_parameters(modules),
        names={
            p: place.name for layer in graph.layers() for p, place in places_of(model.layer(layer.id), layer).items()
        },
        frozen=frozenset(layer.id for layer in graph.layers() if not layer.trainable),
        branches=reaching_modalities(graph),
        batch=batch,
        source=f"{len(scenario.data.manifest):,} rows of a manifest" if scenario.data.manifest else "synthetic",
        device=device,
    )


def sample_modalities(scenario: Scenario, sample: Sample) -> frozenset[str]:
    """Of what some module reads itself."""
    found = set()
    for module in scenario.model.modules:
        if module.vision is not None:
            count = sum(image_patch_counts(scenario.model, module, sample))
        elif module.audio is not None:
            count = sum(audio_clip_frames(module, sample))
        else:
            count = own_tokens(module, sample) if module.vocabulary is not None else 0
        if count:
            found.add(module.modality)
    return frozenset(found)


class _Logits:
    """What the losses of the last forward were computed of, by the module of the loss."""

    def __init__(self, model: MultimodalModel, graph: ComputationGraph) -> None:
        self.last: dict[str, Tensor] = {}
        for layer in graph.layers():
            if layer.kind == "loss":
                (before,) = graph.predecessors(layer.id)
                model.layer(before).register_forward_hook(partial(self._keep, layer.module))

    def _keep(self, module: str, layer: nn.Module, args: object, output: Tensor) -> None:
        self.last[module] = output


def _run(model: MultimodalModel, logits: _Logits, made: partial[Microbatch]) -> Outputs:
    losses = model(made())
    found = dict(logits.last)
    logits.last.clear()  # or the graph would live on
    return Outputs(losses=losses, logits=found)


def _load(model: MultimodalModel, graph: ComputationGraph, saved: Mapping[str, Tensor], folder: Path) -> None:
    used = set()
    with torch.no_grad():
        for layer in graph.layers():
            for parameter, place in places_of(model.layer(layer.id), layer).items():
                value = saved.get(place.name)
                if value is None and layer.kind == "head" and f"{layer.module}.embed/parts.table.weight" in saved:
                    continue  # tied: the table has it
                if value is None or value.shape != parameter.shape:
                    found = "nothing of it" if value is None else f"shape {tuple(value.shape)}"
                    raise InputError(
                        f"the model has '{place.name}' with shape {tuple(parameter.shape)}, the checkpoint {found}",
                        file=folder,
                    )
                parameter.copy_(value)
                used.add(place.name)
    if left := sorted(saved.keys() - used):
        raise InputError(f"the checkpoint has '{left[0]}', which the scenario's model has not", file=folder)


def _in_fp32(scenario: Scenario) -> Scenario:
    """All its modules."""
    modules = tuple(replace(module, precision=None) for module in scenario.model.modules)
    return replace(scenario, precision="fp32", model=replace(scenario.model, modules=modules))
