"""JAX's own shardings place the parameters of a plan: on a mesh of any size, without devices."""

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from random_plans import random_plan

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import op_parameters
from mmplan.cost_models.ops import Linear
from mmplan.planner.formats.jax_module import export_jax
from mmplan.planner.plan import Plan
from mmplan.scenario.layer_ids import expand_ids

pytestmark = pytest.mark.interop


def module_of(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(text, "jax_plan.py", "exec"), names)
    return names


def shard_sizes(names: dict[str, Any], which: str) -> dict[str, int]:
    """Numbers on one rank of the arrays of each layer, as JAX cuts them."""
    from jax.sharding import AbstractMesh, NamedSharding

    mesh = AbstractMesh(tuple(names["AXES"].values()), tuple(names["AXES"]))
    sizes = {}
    for group in names["LAYERS"]:
        total = 0
        for entry in group["parameters"].values():
            assert len(entry[which]) == len(entry["shape"])  # JAX takes longer ones without a word
            total += int(np.prod(NamedSharding(mesh, entry[which]).shard_shape(entry["shape"])))
        sizes |= dict.fromkeys(expand_ids(group["layers"]), total)
    return sizes


def counted(plan: Plan) -> dict[str, int]:
    sizes = {}
    for layer in build_graph(plan.scenario).layers():
        shard, own = plan.layout(0).shard(layer), [op for op in layer.ops if not (isinstance(op, Linear) and op.tied)]
        sizes[layer.id] = sum(op_parameters(op, shard) for op in own)
    return sizes


def test_round_trips_of_random_plans(pytestconfig: pytest.Config) -> None:
    for seed in range(pytestconfig.getoption("--round-trips")):
        plan = random_plan(seed)
        names = module_of(export_jax(plan).files["jax_plan.py"])
        weights, gradients, state = (shard_sizes(names, which) for which in ("weights", "gradients", "state"))
        if plan.sharding == "none":
            assert weights == gradients == state
        if plan.sharding != "parameters":
            assert weights == counted(plan)
        assert all(state[layer] <= gradients[layer] <= weights[layer] for layer in weights)


def test_activations_are_split_as_the_plan_splits_rows_and_heads() -> None:
    from jax.sharding import AbstractMesh, NamedSharding

    for seed in range(8):
        plan = random_plan(seed)
        names = module_of(export_jax(plan).files["jax_plan.py"])
        mesh = AbstractMesh(tuple(names["AXES"].values()), tuple(names["AXES"]))
        for module in plan.scenario.model.modules:
            shape = (plan.dp * plan.width * 2, plan.cp * plan.tp * 4, module.output_width)
            cut = NamedSharding(mesh, names["ACTIVATIONS"][module.name]["between"]).shard_shape(shape)
            whole = plan.width if module.name in plan.spread else 1
            assert cut[0] == shape[0] // (plan.dp * whole)
            rows = plan.cp if module.kind == "language_model" else 1
            assert cut[1] == shape[1] // rows


def test_the_mesh_of_a_stage_has_the_plans_ranks_in_order() -> None:
    plan = next(p for p in map(random_plan, range(60)) if p.pp > 1 and p.dp > 1 and p.width > 1)
    names = module_of(export_jax(plan).files["jax_plan.py"])
    fake = ModuleType("jax.sharding")
    fake.Mesh = lambda devices, axes: (devices, axes)  # type: ignore[attr-defined]
    real = sys.modules["jax.sharding"]
    sys.modules["jax.sharding"] = fake
    try:
        devices, axes = names["mesh"](np.arange(plan.rank_count), stage=1)
    finally:
        sys.modules["jax.sharding"] = real
    assert devices.ravel().tolist() == list(plan.stage_ranks(1))
    assert axes == tuple(names["AXES"])


def test_a_spec_that_does_not_divide_would_be_seen() -> None:
    from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

    with pytest.raises(ValueError, match="evenly divide"):
        NamedSharding(AbstractMesh((3,), ("tp",)), PartitionSpec("tp")).shard_shape((16,))
