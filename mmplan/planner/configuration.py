"""The degrees a plan can have: how many replicas, tensor shards and stages, and how the batch is cut."""

from dataclasses import dataclass
from functools import cache
from math import isqrt

from mmplan.cost_models.degrees import tp_degrees
from mmplan.errors import InfeasibleError
from mmplan.scenario.scenario import Scenario
from mmplan.scenario.schedule_names import ScheduleName

# Forwards of one replica: 64 stages x 8,192 microbatches. A program of that size takes a minute to build and check.
MOST_FORWARDS = 524_288


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Configuration:
    """Everything about a plan but the cut; `microbatches` per replica and step."""

    tp: int
    dp: int
    pp: int
    microbatch_size: int
    microbatches: int
    schedule: ScheduleName

    @property
    def ranks(self) -> int:
        return self.tp * self.dp * self.pp

    def __str__(self) -> str:
        return (
            f"pp={self.pp} x dp={self.dp} x tp={self.tp}, {self.microbatches} microbatches of "
            f"{self.microbatch_size}, {self.schedule}"
        )


def list_configurations(scenario: Scenario, groups: int) -> tuple[Configuration, ...]:
    """All that fit the cluster, the batch and the constraints, with at most `groups` stages.

    GPipe takes as long as 1F1B in the closed form and holds at least as many activations, so it is listed only where
    the constraints exclude 1F1B. Stages x microbatches are at most `MOST_FORWARDS`.

    Raises:
        InfeasibleError: the constraints leave nothing; says which one.
    """
    devices, batch = scenario.cluster.device_count, scenario.global_batch
    rules = scenario.constraints
    # Stages are cut for 1F1B unless only GPipe is allowed; any other schedule is made afterwards, in the same memory.
    schedule: ScheduleName = "gpipe" if set(rules.schedule) == {"gpipe"} else "1f1b"
    possible = tp_degrees(scenario)
    shards = [tp for tp in possible if not rules.tp or tp in rules.tp]
    if not shards:
        wanted, offered = (", ".join(map(str, values)) for values in (rules.tp, possible))
        raise InfeasibleError(
            f"constraints.tp allows {wanted}, but only {offered} divide the heads, widths and nodes of this scenario"
        )
    found = [
        Configuration(tp=tp, dp=dp, pp=pp, microbatch_size=size, microbatches=batch // dp // size, schedule=schedule)
        for tp in shards
        for dp in divisors(batch)
        if dp * tp <= devices and (not rules.dp or dp in rules.dp)
        for pp in range(1, min(groups, devices // (dp * tp)) + 1)
        if not rules.pp or pp in rules.pp
        for size in divisors(batch // dp)
        if (not rules.microbatch or size in rules.microbatch) and pp * (batch // dp // size) <= MOST_FORWARDS
    ]
    if not found:
        raise InfeasibleError(_why_empty(scenario, groups, shards))
    return tuple(found)


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [value for value in range(1, isqrt(number) + 1) if number % value == 0]
    return tuple(sorted({*small, *(number // value for value in small)}))


def _why_empty(scenario: Scenario, groups: int, shards: list[int]) -> str:
    """One sentence on the constraint that leaves no configuration."""
    rules, batch, devices = scenario.constraints, scenario.global_batch, scenario.cluster.device_count
    dp = [value for value in (rules.dp or divisors(batch)) if batch % value == 0]
    if not dp:
        return f"constraints.dp allows {_names(rules.dp)}, and none divides the global batch of {batch}"
    if rules.microbatch and not any(batch // d % size == 0 for d in dp for size in rules.microbatch):
        return (
            f"constraints.microbatch allows {_names(rules.microbatch)} samples, and with dp={_names(dp)} none divides "
            f"the batch of a replica: {', '.join(f'{batch} / {d} = {batch // d}' for d in dp[:4])}"
        )
    pp = [value for value in rules.pp or (1,) if value <= groups]
    if not pp:
        return f"constraints.pp allows {_names(rules.pp)} stages, but the model can be cut into at most {groups} pieces"
    needed = min(shards) * min(dp) * min(pp)
    if needed <= devices:
        return (
            f"every allowed way to cut the global batch of {batch:,} makes more than {MOST_FORWARDS:,} forwards per "
            f"replica (stages x microbatches), and larger programs are not made: allow a larger dp or microbatch"
        )
    least = f"tp={min(shards)} x dp={min(dp)} x pp={min(pp)} = {needed}"
    return f"the smallest allowed layout needs {least} devices, cluster {scenario.cluster.name} has {devices}"


def _names(values: tuple[int, ...] | list[int]) -> str:
    return ", ".join(str(value) for value in values)


def replicas_per_node(configuration: Configuration, devices_per_node: int) -> int:
    """How many replicas of a stage share a node, for the stage where this is least.

    Stage s starts at rank s * dp * tp, so a node boundary may cut through its replicas. Counted in tensor-parallel
    groups, of which a node holds `slots` and which never leave it.
    """
    dp, slots = configuration.dp, max(1, devices_per_node // configuration.tp)
    least = dp
    for stage in range(min(configuration.pp, slots)):  # offsets repeat after at most `slots` stages
        first = min(dp, slots - stage * dp % slots)
        least = min(least, max(first, min(dp - first, slots)))
    return least
