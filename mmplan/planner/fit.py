"""One given configuration, without search: does it fit, what each stage holds, how long a step is, what would help."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mmplan.cost_models.memory_estimate import MemoryEstimate, Verdict
from mmplan.errors import CostModelError, InputError
from mmplan.planner.degrees import Degrees
from mmplan.planner.estimate import StepEstimate, estimate_step
from mmplan.planner.memory import MemoryEstimator
from mmplan.scenario.precisions import unlike_precisions
from mmplan.scenario.scenario import Scenario
from mmplan.scenario.technique import SHARDINGS
from mmplan.units import format_bytes

MOST_CHANGES = 8  # shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One change (or two) of the configuration and the device memory of its fullest stage."""

    text: str
    device_bytes: int
    kind: str  # "fits" or "tight"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The answer to "does it fit": an estimate per stage, the fullest stage's verdict, the step, what would help.

    `step` is None where seconds cannot be priced; `step_problem` says why.
    """

    scenario: Scenario
    degrees: Degrees
    stages: tuple[MemoryEstimate, ...]
    step: StepEstimate | None
    step_problem: str
    changes: tuple[Change, ...]

    @property
    def fullest(self) -> MemoryEstimate:
        return max(self.stages, key=lambda stage: stage.device_bytes)

    @property
    def verdict(self) -> Verdict:
        return self.fullest.verdict

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        verdict, stage = self.verdict, self.fullest.stage
        where = f"stage {stage} of {len(self.stages)}" if len(self.stages) > 1 else "every rank"
        if verdict.kind == "fits":
            return f"fits: {where} holds {verdict.sentence}; largest part: {verdict.decides}"
        return f"{verdict.kind}: {where}: {verdict.sentence}; {verdict.decides} decides"


def fit(scenario: Scenario, degrees: Degrees, *, suggest: bool = True) -> Fit:
    """Memory of every stage and seconds of a step of one configuration.

    Raises:
        InputError: the degrees are impossible for this model, batch or cluster; says the arithmetic. Or modules differ
            in precision.
    """
    if unlike := unlike_precisions(scenario):
        raise InputError(f"precision: fit prices one for all modules, here {unlike}; mmplan optimize prices all")
    estimator = MemoryEstimator(scenario)
    stages = estimator.estimate(scenario, degrees)
    step, problem = None, ""
    try:
        step = estimate_step(scenario, degrees)
    except CostModelError as error:
        problem = str(error)
    result = Fit(scenario=scenario, degrees=degrees, stages=stages, step=step, step_problem=problem, changes=())
    return (
        replace(result, changes=changes_that_fit(result, estimator))
        if suggest and result.verdict.kind != "fits"
        else result
    )


def changes_that_fit(given: Fit, estimator: MemoryEstimator) -> tuple[Change, ...]:
    """Single changes after which the job fits (or is tight, where it was out of memory), least memory first; pairs of
    changes where no single one is enough."""
    better = {"OOM": ("fits", "tight"), "tight": ("fits",), "fits": ()}[given.verdict.kind]
    single = list(_single_changes(given.scenario, given.degrees))
    found = [change for each in single if (change := _tried(*each, better, estimator)) is not None]
    if not found:
        pairs: dict[frozenset[str], tuple[str, Scenario, Degrees]] = {}
        for first, scenario, degrees in single:
            for second, changed, other in _single_changes(scenario, degrees):
                pairs.setdefault(frozenset((first, second)), (f"{first} and {second}", changed, other))
        found = [change for each in pairs.values() if (change := _tried(*each, better, estimator)) is not None]
    distinct = {change.device_bytes: change for change in reversed(found)}
    return tuple(sorted(distinct.values(), key=lambda change: (change.kind, change.device_bytes)))[:MOST_CHANGES]


def _tried(
    text: str, scenario: Scenario, degrees: Degrees, better: tuple[str, ...], estimator: MemoryEstimator
) -> Change | None:
    try:
        stages = estimator.estimate(scenario, degrees)
    except (InputError, CostModelError):
        return None
    fullest = max(stages, key=lambda stage: stage.device_bytes)
    if fullest.verdict.kind not in better:
        return None
    size = fullest.device_bytes
    return Change(text=f"{text}: {format_bytes(size)}", device_bytes=size, kind=fullest.verdict.kind)


def _single_changes(scenario: Scenario, degrees: Degrees) -> Iterator[tuple[str, Scenario, Degrees]]:
    technique = scenario.technique
    if technique.recompute != "full":
        yield (
            "recompute every block",
            replace(scenario, technique=replace(technique, recompute="full", recompute_layers=None)),
            degrees,
        )
    for zero in range(SHARDINGS.index(technique.sharding) + 1, 4):
        yield f"ZeRO-{zero}", replace(scenario, technique=replace(technique, sharding=SHARDINGS[zero])), degrees
    if technique.offload == "none":
        yield (
            "offload the optimizer to host memory",
            replace(scenario, technique=replace(technique, offload="optimizer")),
            degrees,
        )
        yield (
            "offload the activations of blocks to host memory",
            replace(scenario, technique=replace(technique, offload="activations")),
            degrees,
        )
    if degrees.microbatch_size > 1:
        half = replace(degrees, microbatch_size=degrees.microbatch_size // 2, microbatches=degrees.microbatches * 2)
        yield f"mbs {half.microbatch_size}", scenario, half
    if degrees.tp > 1 and not technique.sequence_parallel:
        yield "sequence parallel", replace(scenario, technique=replace(technique, sequence_parallel=True)), degrees
    if technique.attention == "math":
        yield "flash attention", replace(scenario, technique=replace(technique, attention="flash2")), degrees
    for factor in (2, 4):
        yield from _wider(scenario, degrees, factor)


def _wider(scenario: Scenario, degrees: Degrees, factor: int) -> Iterator[tuple[str, Scenario, Degrees]]:
    """Degrees taken from data parallelism, and more devices."""
    per_node = min(pool.devices_per_node for pool in scenario.cluster.pools)
    if degrees.dp % factor == 0:
        fewer = replace(degrees, dp=degrees.dp // factor, microbatches=degrees.microbatches * factor)
        if degrees.tp * factor <= per_node:
            yield f"tp {degrees.tp * factor}, dp {fewer.dp}", scenario, replace(fewer, tp=degrees.tp * factor)
        yield f"pp {degrees.pp * factor}, dp {fewer.dp}", scenario, replace(fewer, pp=degrees.pp * factor)
        yield f"cp {degrees.cp * factor}, dp {fewer.dp}", scenario, replace(fewer, cp=degrees.cp * factor)
    yield f"ep {degrees.ep * factor}", scenario, replace(degrees, ep=degrees.ep * factor)
    if len(scenario.cluster.pools) == 1:
        pool = scenario.cluster.pools[0]
        larger = replace(scenario.cluster, pools=(replace(pool, nodes=pool.nodes * factor),))
        more = replace(degrees, dp=degrees.dp * factor)
        yield f"{larger.device_count} devices, dp {more.dp}", replace(scenario, cluster=larger), more
