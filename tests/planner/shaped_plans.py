"""Random plans of a shape that few random plans have: without pipeline and experts apart, or a stage per modality."""

from dataclasses import replace
from typing import Any

import numpy as np
from random_plans import random_plan

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.degrees import divides
from mmplan.planner.formats.linearised import repriced
from mmplan.planner.plan import Plan, module_of
from mmplan.scenario.scenario import Scenario


def flat_plan(seed: int, **degrees: Any) -> Plan:
    """Sound, one model on all ranks; degrees, recomputation and spread modules are those of `random_plan(seed)`."""
    plan = random_plan(seed)
    levels = [degrees.pop("level", plan.stages[0].recompute)]
    known = {"ep": 1, "etp": 1, **degrees}
    ranks = known.get("dp", plan.dp) * known.get("tp", plan.tp) * known.get("cp", plan.cp)
    scenario = _fitted(plan, ranks, known.get("dp", plan.dp))
    layers = tuple(layer.id for layer in build_graph(scenario).layers())
    if known.get("dp", plan.dp) * known.get("cp", plan.cp) == 1:
        known["sharding"] = "none"
    alone = replace(plan, placement=(), orders=(), schedule="1f1b", schedule_certificate=None)
    return repriced(alone, stages=[layers], levels=levels, scenario=scenario, **known)


def modal_plan(seed: int) -> Plan:
    """Sound, every module's layers in stages of their own, projectors behind their encoders; no experts apart."""
    plan, random = random_plan(seed), np.random.default_rng(seed)
    graph = build_graph(plan.scenario)
    owners: dict[str, list[str]] = {}
    for layer in graph.layers():
        owners.setdefault(_owner(plan.scenario, module_of(layer.id)), []).append(layer.id)
    stages = [piece for layers in owners.values() for piece in _cut(layers, random)]
    tp = plan.tp if all(divides(module, plan.tp) for module in plan.scenario.model.modules) else 1
    scenario = _fitted(plan, tp * plan.dp * len(stages), plan.dp)
    alone = replace(plan, placement=(), orders=(), schedule="1f1b", schedule_certificate=None)
    known = {"ep": 1, "etp": 1, "cp": 1, "tp": tp, "spread": (), "sharding": plan.sharding if plan.dp > 1 else "none"}
    return repriced(alone, stages=stages, levels=["none"] * len(stages), scenario=scenario, **known)


def _owner(scenario: Scenario, name: str) -> str:
    """The module itself, of a projector the encoder that feeds it."""
    if scenario.model.module(name).kind != "projector":
        return name
    return next(edge.producer for edge in scenario.model.edges if edge.consumer == name)


def _cut(layers: list[str], random: np.random.Generator) -> list[tuple[str, ...]]:
    """In one piece, or two where that leaves projectors behind the blocks and a head with its loss."""
    blocks = [place for place, layer in enumerate(layers) if layer.rpartition(".")[2].isdigit()]
    if len(blocks) < 3 or random.random() < 0.5:
        return [tuple(layers)]
    place = blocks[len(blocks) // 2]
    return [tuple(layers[:place]), tuple(layers[place:])]


def _fitted(plan: Plan, ranks: int, dp: int) -> Scenario:
    """The scenario with a cluster of so many devices, in nodes that hold whole tp groups, and the batch of dp."""
    scenario = plan.scenario
    (pool,) = scenario.cluster.pools
    per_node = 8 if ranks % 8 == 0 else ranks
    pool = replace(pool, nodes=ranks // per_node, devices_per_node=per_node)
    batch = dp * plan.microbatch_size * plan.microbatches
    return replace(scenario, global_batch=batch, cluster=replace(scenario.cluster, pools=(pool,)))
