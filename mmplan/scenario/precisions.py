"""The precision of each module, from what a scenario file writes: one word, or words by module and modality."""

from collections.abc import Mapping
from dataclasses import replace

from mmplan.scenario.cluster import Cluster
from mmplan.scenario.document import Document, did_you_mean, listed
from mmplan.scenario.scenario import Dtype, Model, Scenario
from mmplan.scenario.schema import ScenarioSpec

DEFAULT = "default"


def with_precisions(model: Model, spec: ScenarioSpec, cluster: Cluster, document: Document) -> tuple[Model, Dtype]:
    """The model, whose modules have a precision each where they differ, and the precision of all others.

    Raises:
        InputError: an unknown name, a module that is left out, a device without such units, or a choice that needs one
            precision for all.
    """
    if not isinstance(spec.precision, dict):
        _require_units({"": spec.precision}, cluster, document)
        return model, spec.precision
    _require_known(spec.precision, model, document)
    _require_units(spec.precision, cluster, document)
    found = {module.name: _of(spec.precision, module.name, module.modality) for module in model.modules}
    left = [name for name, precision in found.items() if precision is None]
    if left:
        message = f"{listed(left)} has none: name it, its modality or '{DEFAULT}'"
        raise document.error(("precision",), message)
    several = tuple(dict.fromkeys(one for one in found.values() if one is not None))
    if len(several) == 1:
        return model, several[0]
    _require_plain(spec, model, document)
    modules = tuple(replace(module, precision=found[module.name]) for module in model.modules)
    return replace(model, modules=modules), spec.precision.get(DEFAULT, several[0])


def unlike_precisions(scenario: Scenario) -> str:
    """`vision fp32, llm bf16`; empty where all modules have one precision."""
    if len(scenario.precisions) == 1:
        return ""
    return ", ".join(f"{module.name} {scenario.precision_of(module)}" for module in scenario.model.modules)


def _of(said: Mapping[str, Dtype], module: str, modality: str) -> Dtype | None:
    """What is said of the module itself counts more than what is said of its modality, and this more than the rest."""
    return said.get(module) or said.get(modality) or said.get(DEFAULT)


def _require_known(said: Mapping[str, Dtype], model: Model, document: Document) -> None:
    modalities = (module.modality for module in model.modules)
    known = list(dict.fromkeys((DEFAULT, *(module.name for module in model.modules), *modalities)))
    for name in said:
        if name not in known:
            hint = did_you_mean(name, known) or f"; known: {listed(known)}"
            raise document.error(("precision", name), f"no module or modality of this name{hint}")


def _require_units(said: Mapping[str, Dtype], cluster: Cluster, document: Document) -> None:
    for pool in cluster.pools:
        for name, precision in said.items():
            if pool.device.flops_per_s(precision) is None:
                known = [dtype for dtype in ("fp32", "bf16", "fp16") if pool.device.flops_per_s(dtype) is not None]
                message = f"{pool.device.name} has no {precision} units; it has {listed(known)}"
                raise document.error(("precision", name) if name else ("precision",), message)


def _require_plain(spec: ScenarioSpec, model: Model, document: Document) -> None:
    """What is priced and run for one precision only."""
    wanted = (
        ("fp8", [spec.technique.fp8], spec.constraints.fp8, {"none"}),
        ("offload", [spec.technique.offload], spec.constraints.offload, {"none", "activations"}),
    )
    for key, technique, allowed, fine in wanted:
        for at, words in (("technique", technique), ("constraints", allowed)):
            others = [word for word in words if word is not None and word not in fine]
            if others:
                message = f"'{others[0]}' needs one precision for all modules, and 'precision' gives them several"
                raise document.error((at, key), message)
