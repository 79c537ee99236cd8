"""What degrees do not divide, with the arithmetic."""

from math import gcd

from mmplan.cost_models.degrees import sharded_widths
from mmplan.scenario.layer_ids import module_layer_ids
from mmplan.scenario.scenario import ModelModule, Scenario


def undivided_experts(scenario: Scenario, ep: int) -> str:
    """What ep does not divide; empty where it divides the experts."""
    shapes = [module.transformer for module in scenario.model.modules if module.transformer is not None]
    experts = [shape.moe.experts for shape in shapes if shape.moe is not None]
    if not experts:
        return f"no module of {scenario.name} has experts"
    if gcd(*experts) % ep == 0:
        return ""
    uneven = next(count for count in experts if count % ep)
    return division(f"{uneven} experts", uneven, "ep", ep)


def undivided_by_tp(scenario: Scenario, tp: int) -> str:
    """What tp does not divide; empty where it divides everything it has to."""
    for size in sorted({pool.devices_per_node for pool in scenario.cluster.pools}):
        if size % tp:
            return division(f"a node's {size} devices", size, "tp", tp)
    languages = [module for module in scenario.model.modules if module.kind == "language_model"]
    for module in languages or scenario.model.modules:
        if module.recorded and tp not in (1, *module.recorded_tp) and not module.whole:
            known = ", ".join(map(str, module.recorded_tp)) or "none"
            return f"the recording of {scenario.model.name} has no layers that {tp} ranks share; its degrees: {known}"
        if module.whole and tp > 1:
            return (
                f"tp {tp} would split {module.name}, and {_shielding(scenario, module)} forbids tensor_sharding there"
            )
        for name, size in sharded_widths(module).items():
            if size % tp:
                fill = "; constraints.pad_heads fills heads up" if name in ("heads", "kv_heads") else ""
                return division(f"{module.name}: {name} {size:,}", size, "tp", tp) + fill
    return ""


def _shielding(scenario: Scenario, module: ModelModule) -> str:
    layers = set(module_layer_ids(module))
    names = [z.name for z in scenario.constraints.zones if "tensor_sharding" in z.forbid and layers & set(z.layers)]
    return f"zone {names[0]}" if names else "a zone"


def division(what: str, size: int, key: str, degree: int) -> str:
    return f"{what} / {key} {degree} = {size / degree:.4g} is no whole number"
