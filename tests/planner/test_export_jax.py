"""Plans as meshes and PartitionSpecs: what lies on a rank is what the plan has there."""

from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import pytest
from export_readers import same_by_jax
from jax_reading import local_size, parameters_by_layer, read_module
from random_plans import random_plan

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import op_parameters
from mmplan.cost_models.ops import Linear
from mmplan.errors import CheckError
from mmplan.planner.formats.exported import Exported
from mmplan.planner.formats.jax_mesh import mesh_axes
from mmplan.planner.formats.jax_module import export_jax
from mmplan.planner.plan import scenario_hash

SEEDS = range(8)


@cache
def made(seed: int) -> Exported:
    return export_jax(random_plan(seed))


def exported(seed: int) -> dict[str, Any]:
    return read_module(made(seed).files["jax_plan.py"])


@pytest.mark.parametrize("seed", SEEDS)
def test_every_rank_holds_the_parameters_that_the_plan_counts(seed: int) -> None:
    plan = random_plan(seed)
    names = read_module(export_jax(replace(plan, sharding="none")).files["jax_plan.py"])
    graph, by_layer, axes = build_graph(plan.scenario), parameters_by_layer(names), names["AXES"]
    assert set(by_layer) == {layer.id for layer in graph.layers()}
    for layer in graph.layers():
        shard = plan.layout(0).shard(layer)
        counted = sum(op_parameters(op, shard) for op in layer.ops if not (isinstance(op, Linear) and op.tied))
        assert sum(local_size(entry, axes) for entry in by_layer[layer.id].values()) == counted, layer.id


@pytest.mark.parametrize("seed", SEEDS)
def test_stages_have_the_plans_layers_and_ranks(seed: int) -> None:
    plan, axes = random_plan(seed), exported(seed)["AXES"]
    assert same_by_jax(plan, made(seed))
    assert prod(axes.values()) == plan.dp * plan.width


@pytest.mark.parametrize("seed", SEEDS)
def test_zero_shards_what_its_stage_says(seed: int) -> None:
    plan = random_plan(seed)
    names = exported(seed)
    axes, stage = names["AXES"], ("none", "optimizer", "gradients", "parameters").index(plan.sharding)
    smaller = 0
    for parameters in parameters_by_layer(names).values():
        for entry in parameters.values():
            sizes = [local_size(entry, axes, which) for which in ("weights", "gradients", "state")]
            assert sizes == sorted(sizes, reverse=True)
            assert sizes[0] == sizes[1] or stage == 2
            assert sizes[1] == sizes[2] or stage == 1
            smaller += sizes[2] < sizes[0]
    assert (smaller > 0) == (stage in (1, 2) and plan.dp * plan.cp > 1)


def test_experts_and_layers_share_one_mesh() -> None:
    plan = replace(next(plan for plan in map(random_plan, range(60)) if plan.ep > 1), tp=2, cp=1, dp=8, ep=4, etp=1)
    axes = mesh_axes(plan)
    assert axes.size(axes.dp) == plan.dp
    assert axes.size(axes.tp) == plan.tp
    assert axes.size(axes.ep) == plan.ep
    assert axes.size(axes.expert_replicas) * plan.ep * plan.ranks_per_expert == plan.dp * plan.width
    assert axes.sizes == (("dp1", 4), ("dp0", 2), ("tp", 2))


def test_groups_that_no_one_mesh_has_are_refused() -> None:
    plan = next(plan for plan in map(random_plan, range(60)) if plan.ep > 1)
    odd = replace(plan, tp=1, cp=3, dp=2, ep=2, etp=1)
    with pytest.raises(CheckError, match="3 is no multiple of 2, so no one mesh has both"):
        mesh_axes(odd)


def test_pipelines_are_a_plug_in_that_is_told() -> None:
    for seed in SEEDS:
        plan, told = random_plan(seed), [loss.sentence for loss in made(seed).losses]
        assert any("plug-in for pipeline stages" in sentence for sentence in told) == (plan.pp > 1)


def test_a_name_cannot_reach_into_the_module() -> None:
    plan = random_plan(0)
    scenario = replace(plan.scenario, name='x"""\nraise SystemExit\n"""')
    renamed = replace(plan, scenario=scenario, scenario_hash=scenario_hash(scenario))
    assert read_module(export_jax(renamed).files["jax_plan.py"])["STAGES"]


def test_a_plan_of_one_rank_splits_nothing() -> None:
    plan = replace(random_plan(0), dp=1, tp=1, cp=1, ep=1)
    axes = mesh_axes(plan)
    assert (axes.dp, axes.cp, axes.tp, axes.ep, axes.etp, axes.expert_replicas) == ((),) * 6


def test_columns_are_split_before_rows_as_megatron_does() -> None:
    """Queries, keys, values, up and gate by outputs; what follows them by inputs; experts over ep."""
    plan = next(plan for plan in map(random_plan, range(60)) if plan.tp > 1 and plan.ep > 1 and plan.sharding == "none")
    names = read_module(export_jax(plan).files["jax_plan.py"])
    axes = mesh_axes(plan)
    of_tp = axes.tp[0] if len(axes.tp) == 1 else axes.tp
    of_ep = axes.ep[0] if len(axes.ep) == 1 else axes.ep
    for group in names["LAYERS"]:
        if group["module"] != "llm":
            continue
        for name, entry in group["parameters"].items():
            spec = entry["weights"]
            if name in ("q.weight", "k.weight", "v.weight", "up.weight", "gate.weight", "head.weight"):
                assert spec == (None, of_tp), name
            if name in ("o.weight", "down.weight", "table.weight"):
                assert spec == (of_tp, None), name
            if name.startswith("experts_"):
                assert spec[0] == of_ep, name
