"""No-split zones of a scenario: what a file writes, as layers, and what each forbids.

A zone is an entry of `constraints.no_split` (a layer, a range `llm.0-7`, a module for all its layers) or a run of
sensitive layers. All zones forbid cuts; `constraints.forbid` adds what the planner can keep apart or can say is so.
"""

from collections.abc import Sequence
from dataclasses import replace

from mmplan.scenario.asked import Forbidden, Zone
from mmplan.scenario.document import Document, KeyPath, listed
from mmplan.scenario.layer_ids import layers_named, module_layer_ids
from mmplan.scenario.scenario import Constraints, Model, Scenario
from mmplan.scenario.schema import ConstraintsSpec
from mmplan.scenario.sensitivity import sensitive_zones


def zones_from_spec(spec: ConstraintsSpec, scenario: Scenario, document: Document) -> tuple[Zone, ...]:
    """The zones of a scenario file, those of the sensitivity file last.

    Args:
        scenario: the scenario without zones.

    Raises:
        InputError: a layer that the model does not have, a range that runs backwards, a sensitivity file that is
            wrong, or something to forbid that is done everywhere or nowhere.
    """
    model = scenario.model
    layers_of = [(item, _layers(index, item, model, document)) for index, item in enumerate(spec.no_split)]
    if spec.sensitivity is not None:
        percentile = spec.percentile if "percentile" in spec.model_fields_set else None
        layers_of += sensitive_zones(spec.sensitivity, percentile, model, document)
    elif "percentile" in spec.model_fields_set:
        at: KeyPath = ("constraints", "percentile")
        raise document.error(at, "a percentile needs the values it is of: name their file in 'sensitivity'")
    forbid = _forbidden(spec, scenario, document)
    if forbid != ("split",) and not layers_of:
        raise document.error(("constraints", "forbid"), "there is no zone: no_split is empty and sensitivity not given")
    zones = tuple(Zone(name=name, layers=layers, forbid=forbid) for name, layers in layers_of)
    _refuse_contradiction(spec, zones, model, document)
    return zones


def under_zones(scenario: Scenario, zones: Sequence[Zone]) -> Scenario:
    """The scenario with exactly these zones."""
    modules = tuple(
        replace(module, whole=any(_shields(zone, module_layer_ids(module)) for zone in zones))
        for module in scenario.model.modules
    )
    constraints: Constraints = replace(scenario.constraints, zones=tuple(zones), no_split=no_split_layers(zones))
    return replace(scenario, model=replace(scenario.model, modules=modules), constraints=constraints)


def no_split_layers(zones: Sequence[Zone]) -> tuple[str, ...]:
    """Layer ids next to which no cut may lie."""
    return tuple(dict.fromkeys(layer for zone in zones for layer in zone.layers))


def _shields(zone: Zone, layers: Sequence[str]) -> bool:
    """Whether the zone keeps one of these layers whole."""
    return "tensor_sharding" in zone.forbid and not set(zone.layers).isdisjoint(layers)


def _forbidden(spec: ConstraintsSpec, scenario: Scenario, document: Document) -> tuple[Forbidden, ...]:
    """`constraints.forbid`, cuts always among them."""
    forbid: list[Forbidden] = ["split"]
    technique = scenario.technique
    for index, item in enumerate(spec.forbid):
        at: KeyPath = ("constraints", "forbid", index)
        summed = technique.gradient_dtype or scenario.optimizer.gradient_dtype
        if item == "compression" and set(spec.compression) == {"none"}:
            message = "constraints.compression allows none, so there is nothing to forbid; remove 'compression'"
            raise document.error(at, message)
        if item == "low_precision_reduce" and summed != "fp32":
            message = f"all gradients are summed in {summed} alike; set the gradient_dtype of optimizer and technique"
            raise document.error(at, f"{message} to fp32, or remove 'low_precision_reduce' here")
        if item not in forbid:
            forbid.append(item)
    return tuple(forbid)


def _refuse_contradiction(spec: ConstraintsSpec, zones: Sequence[Zone], model: Model, document: Document) -> None:
    """A language model is split by tp as a whole or not at all."""
    for module in model.modules:
        shielding = [zone.name for zone in zones if _shields(zone, module_layer_ids(module))]
        if module.kind == "language_model" and shielding and spec.tp and 1 not in spec.tp:
            allowed = ", ".join(map(str, spec.tp))
            message = f"tensor_sharding is forbidden in {listed(shielding, 3)}, which leaves tp = 1 for '{module.name}'"
            raise document.error(("constraints", "forbid"), f"{message}, and constraints.tp allows {allowed}")


def _layers(index: int, item: str, model: Model, document: Document) -> tuple[str, ...]:
    """Layer ids of one entry of `constraints.no_split`."""
    try:
        return layers_named(item, {module.name: module_layer_ids(module) for module in model.modules})
    except ValueError as error:
        raise document.error(("constraints", "no_split", index), str(error)) from None
