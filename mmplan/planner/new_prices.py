"""A plan's scenario under new prices: a device profile (`mmplan calibrate`), or live profiles of its modalities."""

from dataclasses import replace
from pathlib import Path

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import parameters
from mmplan.cost_models.loads import mean_loads
from mmplan.errors import InputError
from mmplan.planner.plan import Plan
from mmplan.scenario import modality_profile, profile
from mmplan.scenario.document import listed, read_document, shown
from mmplan.scenario.modality_profile import ModalityProfile, read_modality_profiles
from mmplan.scenario.profile import Profile, load_profile, paced, profile_device, profile_link
from mmplan.scenario.scenario import DTYPE_BYTES, Scenario
from mmplan.units import format_bytes

# Weights of the profile may differ so far from the model's before it is said: rounding, a norm more or less.
SAME_WEIGHTS = 0.05


def with_profile(plan: Plan, path: Path) -> Scenario:
    """The scenario of the plan under the prices of a profile file of either kind.

    Raises:
        InputError: the file is neither, or is about another device or model.
    """
    schema = read_document(path).values.get("schema")
    if schema == profile.SCHEMA:
        return on_profile(plan.scenario, load_profile(path), path)
    if schema == modality_profile.SCHEMA:
        return _at_pace(plan, read_modality_profiles(path, plan.scenario.model))
    known = listed((profile.SCHEMA, modality_profile.SCHEMA))
    raise InputError(f"expected one of {known}, found {shown(schema)}", file=path, key="schema")


def weights_doubt(plan: Plan, path: Path) -> str:
    """One sentence where a live profile counts other weights than the model has; empty where all is well."""
    if read_document(path).values.get("schema") != modality_profile.SCHEMA:
        return ""
    graph, clauses = build_graph(plan.scenario), []
    for entry in read_modality_profiles(path, plan.scenario.model):
        layers = [layer for layer in graph.layers() if layer.module in entry.modules]
        ours = sum(parameters(layer) * DTYPE_BYTES[plan.scenario.precision_of(layer)] for layer in layers)
        theirs = entry.parameter_bytes
        if theirs is not None and abs(theirs - ours) > SAME_WEIGHTS * ours:
            clauses.append(f"{entry.name}: {format_bytes(theirs)} there, {format_bytes(ours)} in the plan's model")
    return f"the profile counts other weights, is it of this model? {'; '.join(clauses)}" if clauses else ""


def forward_s(plan: Plan, modules: tuple[str, ...]) -> float:
    """Seconds in which the plan's ranks run these modules forward for a mean microbatch, stage after stage."""
    graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
    total_s = 0.0
    for index, stage in enumerate(plan.stages):
        layout, loads = plan.layout(index), mean_loads(plan.scenario, plan.samples(index))
        for layer in map(graph.layer, stage.layers):
            if layer.module in modules:
                total_s += costs.forward_s(layer, loads[layer.module], layout)
    return total_s


def on_profile(scenario: Scenario, measured: Profile, path: Path) -> Scenario:
    """The profile's numbers on every pool of its base device, and the pace of its modules; `path` is its file.

    Raises:
        InputError: no pool has that device.
    """
    names = [pool.device.name for pool in scenario.cluster.pools]
    if measured.base not in names:
        message = f"the profile was measured on '{measured.base}', the plan is for {listed(dict.fromkeys(names))}"
        raise InputError(message, file=path, key="base")
    source = f"profile {path.name}"
    device, link = profile_device(measured, source), profile_link(measured, source)
    pools = tuple(
        replace(pool, device=device, node_link=link or pool.node_link) if pool.device.name == measured.base else pool
        for pool in scenario.cluster.pools
    )
    one_node = len(pools) == 1 and pools[0].nodes == 1
    network = pools[0].node_link if one_node else scenario.cluster.network_link
    cluster = replace(scenario.cluster, pools=pools, network_link=network)
    return replace(scenario, cluster=cluster, model=paced(scenario.model, measured))


def _at_pace(plan: Plan, entries: tuple[ModalityProfile, ...]) -> Scenario:
    """Each module's seconds scaled so that the plan's forward takes what was measured."""
    factors = {}
    for entry in entries:
        priced_s = forward_s(plan, entry.modules)
        for module in entry.modules:
            before = plan.scenario.model.module(module).time_factor
            factors[module] = before * entry.forward_s / priced_s if priced_s > 0 else before
    model = plan.scenario.model
    modules = tuple(replace(m, time_factor=factors.get(m.name, m.time_factor)) for m in model.modules)
    return replace(plan.scenario, model=replace(model, modules=modules))
