"""Which monitors a run of `mmplan execute` has: where the branches, embeddings and attentions of its model lie."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.ops import Attention
from mmplan.errors import InputError
from mmplan.planner.plan import Plan
from mmplan.runtime.ghost.job import run_job_file
from mmplan.runtime.health.places import guessed_branches, guessed_modalities, module_at
from mmplan.runtime.health.rank_taps import RankTaps
from mmplan.runtime.health.rules import chosen_rules
from mmplan.runtime.health.settings import Settings
from mmplan.runtime.hessian.subject import reaching_modalities
from mmplan.runtime.layers import LayerModule
from mmplan.runtime.model import module_path
from mmplan.runtime.stage import LayerStage
from mmplan.runtime.train import Prepared

_OF_A_JOB = ("modalities", "branches", "embeddings", "cross_attention", "keys", "limits", "fires", "head_shards")


def branch_layers(graph: ComputationGraph) -> dict[str, Layer]:
    """Modality -> the layer whose output goes to the fusion: the last one of an encoder's branch, the table of
    tokens."""
    reaching = reaching_modalities(graph)
    losses = {layer.module for layer in graph.layers() if layer.kind == "loss"}
    found: dict[str, Layer] = {}
    for edge in graph.edges():
        producer, consumer = graph.layer(edge.producer), graph.layer(edge.consumer)
        if producer.module != consumer.module and consumer.module in losses:
            found.setdefault(reaching[producer.id][0], producer)
    for layer in graph.layers():
        if layer.kind == "token_embed" and layer.module in losses:
            found.setdefault(layer.modality, layer)
    return found


def cross_layers(graph: ComputationGraph) -> tuple[str, ...]:
    return tuple(la.id for la in graph.layers() if any(isinstance(op, Attention) and op.cross for op in la.ops))


def run_settings(plan: Plan, model: nn.Module | None, job: Path | None, interval: int) -> Settings:
    """What every rank watches for, and rank 0 judges by; paths are those of the whole model.

    Args:
        model: the user's own; job: its file, whose `health` may name modules.

    Raises:
        InputError: `health` of the job is wrong.
    """
    if model is None:
        graph = build_graph(plan.scenario)
        paths = {modality: module_path(layer.id) for modality, layer in branch_layers(graph).items()}
        return Settings(
            modalities=paths,
            branches=paths,
            embeddings=paths,
            cross_attention=cross_layers(graph),
            rules=chosen_rules(),
            interval=interval,
            partial=True,
        )
    asked = {} if job is None else run_job_file(job).get("health", {})
    if not isinstance(asked, Mapping):
        found = type(asked).__name__
        raise InputError(f"expected a dict of arguments of attach, found {found}", file=job, key="health")
    known: dict[str, Any] = {key: value for key, value in asked.items() if key in _OF_A_JOB}
    try:
        rules = chosen_rules(known.pop("limits", None), known.pop("fires", None))
        modalities = dict(known.pop("modalities", None) or guessed_modalities(model))
        branches = dict(known.pop("branches", None) or guessed_branches(model, modalities))
        settings = Settings(
            modalities=modalities, branches=branches, rules=rules, interval=interval, partial=True, **known
        )
        for path in (*branches.values(), *settings.embeddings.values(), *settings.keys.values()):
            module_at(model, path)
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(str(error), file=job, key="health") from error
    return settings


def rank_taps(plan: Plan, prepared: Prepared, settings: Settings) -> RankTaps | None:
    """None in a rehearsal, which computes nothing."""
    if not prepared.stages:
        return None
    if prepared.model is not None:
        own = {id(parameter) for stage in prepared.stages for parameter in stage.places}
        here = _of_rank(settings, prepared.model, own, whole=plan.pp == 1)
        paired = bool(settings.embeddings)
        if not paired:  # their drift is looked at
            here = replace(here, embeddings=here.branches)
        return RankTaps(plan, prepared.stages, [prepared.model], here, layers={}, paired=paired)
    graph = build_graph(plan.scenario)
    stages = [stage for stage in prepared.stages if isinstance(stage, LayerStage)]
    layers: dict[str, LayerModule] = {}
    wanted = {*cross_layers(graph)[-1:], *(_last_attention(graph) if plan.tp > 1 else ())}
    for stage in stages:
        for layer_id in stage.layer_ids:
            module = stage.model.layer(layer_id)
            if layer_id in wanted and isinstance(module, LayerModule):
                layers[layer_id] = module
    dealt = frozenset(m for m, layer in branch_layers(graph).items() if layer.module in plan.spread)
    models = [stage.model for stage in stages]
    built_in = replace(settings, cross_attention=())  # layers tell of their attention themselves
    return RankTaps(plan, prepared.stages, models, built_in, layers=layers, dealt=dealt)


def _last_attention(graph: ComputationGraph) -> tuple[str, ...]:
    """Of each module the last layer with keys of its own."""
    last = {la.module: la.id for la in graph.layers() if any(isinstance(op, Attention) for op in la.ops)}
    return tuple(last.values())


def _of_rank(settings: Settings, model: nn.Module, own: set[int], *, whole: bool) -> Settings:
    """Modules whose weights lie here; what stands in for those of other ranks is not looked at."""

    def here(path: str) -> bool:
        parameters = list(model.get_submodule(path).parameters())
        return whole if not parameters else all(id(parameter) in own for parameter in parameters)

    def named(paths: Mapping[str, str]) -> dict[str, str]:
        return {name: path for name, path in paths.items() if here(path)}

    return replace(
        settings,
        branches=named(settings.branches),
        embeddings=named(settings.embeddings),
        keys=named(settings.keys),
        cross_attention=tuple(path for path in settings.cross_attention if here(path)),
    )
