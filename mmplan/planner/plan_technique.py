"""Which techniques a search over plans can price, and which one a run does."""

from collections.abc import Iterator
from dataclasses import fields

from mmplan.errors import InputError
from mmplan.scenario.scenario import Scenario
from mmplan.scenario.stacks import technique_of


def require_plannable(scenario: Scenario) -> None:
    """Refuse choices whose time or memory does not add up from layers, stages and microbatches.

    Raises:
        InputError: names the choice, why, and the command that prices it.
    """
    for choice, why in _unpriced(scenario):
        raise InputError(
            f"technique.{choice}: plans do not price this ({why}); mmplan fit prices a given configuration with it"
        )


def _unpriced(scenario: Scenario) -> Iterator[tuple[str, str]]:
    technique, summed = scenario.technique, scenario.optimizer.gradient_dtype
    of_stack = f" (what stack {technique.stack} does)" if technique.stack != "mmplan" else ""
    unknown = [pool.device.name for pool in scenario.cluster.pools if pool.device.host_bytes_per_s is None]
    if technique.offload != "none" and unknown:
        yield (
            f"offload: {technique.offload}{of_stack}",
            f"the link of {unknown[0]} to host memory is not in the catalogue",
        )
    if technique.recompute_layers is not None:
        yield (
            f"recompute_layers: {technique.recompute_layers}{of_stack}",
            "a plan chooses the blocks that each stage recomputes",
        )
    if technique.frozen_hooks:
        yield f"frozen_hooks: true{of_stack}", "the seconds of the needless gradients are unknown"
    if technique.overlap_dp:
        yield f"overlap_dp: true{of_stack}", "a plan sums gradients after the last backward"
    if technique.gradient_dtype not in (None, summed):
        reason = f"a plan sums gradients in optimizer.gradient_dtype, which is {summed}"
        yield f"gradient_dtype: {technique.gradient_dtype}{of_stack}", reason


def require_executable(scenario: Scenario) -> None:
    """Refuse a technique that mmplan's own runtime does not do.

    Raises:
        InputError: names the first choice that differs from the runtime's.
    """
    technique, own = scenario.technique, technique_of("mmplan")
    for name in (field.name for field in fields(own)):
        wanted, done = getattr(technique, name), getattr(own, name)
        if name == "gradient_dtype" and wanted in (None, scenario.optimizer.gradient_dtype):
            continue
        # A plan says what it has of these, and both ways of context parallelism are done.
        said = ("recompute", "sharding", "compression", "context_parallel", "sequence_parallel")
        if name in said or wanted == "activations":
            continue
        if wanted != done:
            raise InputError(
                f"the plan was made for technique.{name}: {_written(wanted)}, and this release's runtime does "
                f"{_written(done)} only: {without(scenario, name)} and optimize again, or rehearse the plan"
            )


def without(scenario: Scenario, name: str) -> str:
    """What to change in a scenario so that its plans do without a technique."""
    if name == "sequence_parallel" and scenario.constraints.sequence_parallel:
        return "write `sequence_parallel: false` in its constraints"
    return f"remove `{name}` from the scenario"


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "the optimizer's" if value is None else str(value)
