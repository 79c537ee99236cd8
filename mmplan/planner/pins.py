"""Degrees that a user asks about, such as `tp=4 pp=2`: read, imposed on a scenario, looked for in a plan.

What can be said without solving is said here, with the arithmetic: a degree that divides nothing, or too many devices.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmplan.cost_models.layout import base_of
from mmplan.errors import InputError
from mmplan.planner.branches import branches
from mmplan.planner.configurations import allowed_chunks
from mmplan.planner.plan import Plan
from mmplan.planner.undivided import division, undivided_by_tp
from mmplan.scenario.asked import OwnRanks
from mmplan.scenario.document import did_you_mean, listed, shown
from mmplan.scenario.scenario import Scenario
from mmplan.scenario.schedule_names import SCHEDULE_NAMES
from mmplan.scenario.schema_values import MAX_COUNT
from mmplan.scenario.technique import COMPRESSIONS, FP8S, OFFLOADS, RECOMPUTES, SHARDINGS

COUNTS = ("tp", "pp", "dp", "cp", "ep", "etp", "vp", "microbatch")
WORDS: dict[str, Collection[str]] = {
    "sharding": SHARDINGS,
    "recompute": RECOMPUTES,
    "offload": OFFLOADS,
    "compression": COMPRESSIONS,
    "fp8": FP8S,
    "sequence_parallel": ("false", "true"),
    "schedule": SCHEDULE_NAMES,
}
KEYS = (*COUNTS, *WORDS, "spread", "modules", "encode_together", "prefetch")
OWN_DEGREES = ("tp", "cp", "ep", "dp", "pp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pins:
    """Allowed values by key of `Constraints`; of `spread` exactly those modules."""

    text: str
    values: dict[str, tuple[Any, ...]]

    def of(self, key: str) -> tuple[Any, ...]:
        """Empty where the key is free."""
        return self.values.get(key, ())


def questions(scenario: Scenario, texts: Sequence[str], zone_prices: bool, *, by_step_time: bool) -> tuple[Pins, ...]:
    """What `--why-not` asks, read before anything is solved.

    Args:
        by_step_time: whether there is a search for the shortest step to hold alternatives against.

    Raises:
        InputError: a question that cannot be read, or that has no answer here.
    """
    if (texts or zone_prices) and not by_step_time:
        option = "--why-not" if texts else "--zone-prices"
        raise InputError(f"{option} compares step times: use it with --objective step-time and without --naive")
    if zone_prices and not scenario.constraints.zones:
        raise InputError("--zone-prices: the scenario has no zones: constraints.no_split is empty")
    return tuple(parse_pins(text, scenario) for text in texts)


def parse_pins(text: str, scenario: Scenario) -> Pins:
    """`tp=4 pp=2,4 spread=vision` (`spread=none`: no module; `spread=vision:patches`: cut along patches);
    `vision.tp=1 vision.dp=8`: on ranks of its own, as `modules=vision` says without degrees, and `modules=none` that no
    module has any; `encode_together=4`: all encoders on 4 microbatches at once, `encode_together=vision:4` this one;
    `prefetch=vision`: a step ahead.

    Raises:
        InputError: an unknown key or value, a key given twice, or nothing.
    """
    values: dict[str, tuple[Any, ...]] = {}
    own: tuple[OwnRanks, ...] | None = None
    seen: set[str] = set()
    for part in text.split():
        key, equals, value = part.partition("=")
        if not equals or not value:
            raise _error(text, f"expected KEY=VALUE such as tp=4, found {shown(part)}")
        if key == "modules" or "." in key:
            if key in seen:
                raise _error(text, f"{key} is given twice; several values are written {key}=1,2")
            seen.add(key)
            own = _own_ranks(text, key, value.split(","), scenario, own or ())
            continue
        if key not in KEYS:
            raise _error(text, f"unknown key {shown(key)}{did_you_mean(key, KEYS) or f'; known: {listed(KEYS, 40)}'}")
        if key in values:
            raise _error(text, f"{key} is given twice; several values are written {key}=1,2")
        words = value.split(",")
        if key == "encode_together":
            values[key] = _together(text, words, scenario)
            continue
        if key == "spread":
            cut = [word.removesuffix(":patches") for word in words if word.endswith(":patches")]
            words = [word.removesuffix(":patches") for word in words]
            values["patches"] = _values(text, key, cut, scenario)
        values[key] = _values(text, key, words, scenario)
    if own is not None:
        values["modules"] = own
    if not values:
        raise _error(text, "expected degrees such as 'tp=4 pp=2', found none")
    if "schedule" in values and len(values) > 1:
        raise _error(text, "a schedule is asked alone: it is one of the plan's own cut, which degrees would change")
    return Pins(text=" ".join(text.split()), values=values)


def pinned(scenario: Scenario, pins: Pins) -> Scenario:
    """The scenario in which only these values are allowed, whatever it allowed before."""
    values: dict[str, Any] = dict(pins.values)
    technique = scenario.technique
    if pins.of("fp8"):  # the constraints say it
        technique = replace(technique, fp8="none")
    if pins.of("compression"):  # what compresses already is not asked whether it should
        technique = replace(technique, compression=pins.of("compression")[0])
    return replace(scenario, technique=technique, constraints=replace(scenario.constraints, **values))


def has_pins(plan: Plan, pins: Pins) -> bool:
    """Whether the plan is one of those asked about."""
    found: dict[str, set[Any]] = {
        "tp": {plan.tp},
        "pp": {plan.pp},
        "dp": {plan.dp},
        "cp": {plan.cp},
        "ep": {plan.ep},
        "etp": {plan.ranks_per_expert},
        "vp": {plan.vp},
        "offload": {plan.scenario.technique.offload},
        "compression": {plan.scenario.technique.compression},
        "fp8": {plan.scenario.technique.fp8},
        "sequence_parallel": {plan.scenario.technique.sequence_parallel},
        "microbatch": {plan.microbatch_size},
        "sharding": {plan.sharding},
        "recompute": {base_of(stage.recompute) for stage in plan.stages},
    }
    if "prefetch" in pins.values and set(plan.prefetch) != set(pins.of("prefetch")):
        return False
    same_spread = "spread" not in pins.values or set(plan.spread) == set(pins.of("spread"))
    same_spread = same_spread and ("spread" not in pins.values or set(plan.patches) == set(pins.of("patches")))
    counted = [key for key in pins.values if key not in ("spread", "patches", "modules", "encode_together", "prefetch")]
    together = {name: factor for name, (factor,) in pins.of("encode_together")}
    same_factors = "encode_together" not in pins.values or _factors(plan, plan.together, plan.batch_factor) == _factors(
        plan, tuple(name for name, factor in together.items() if factor > 1), max([1, *together.values()])
    )
    alike = same_spread and same_factors and _has_own_ranks(plan, pins)
    return alike and all(found[key] <= set(pins.of(key)) for key in counted)


def _factors(plan: Plan, names: Sequence[str], factor: int) -> tuple[frozenset[str], int]:
    """The modules of all branches with one of these, and what they run at once."""
    held = [branch for branch in branches(plan.scenario) if set(branch) & set(names)]
    return frozenset(name for branch in held for name in branch), factor


def _has_own_ranks(plan: Plan, pins: Pins) -> bool:
    if "modules" not in pins.values:
        return True
    wanted: tuple[OwnRanks, ...] = pins.of("modules")
    stages = [plan.mesh(stage) for stage in range(len(plan.stages))]
    matched = set()
    for pin in wanted:
        for mesh in plan.meshes:
            degrees = [(getattr(mesh, name), getattr(pin, name)) for name in ("tp", "cp", "ep", "dp")]
            degrees.append((stages.count(mesh), pin.pp))
            if pin.module in mesh.modules and all(not allowed or has in allowed for has, allowed in degrees):
                matched.add(mesh)
    return len(matched) == len(wanted) == len(plan.meshes)


def overruled(scenario: Scenario, pins: Pins) -> str:
    """`constraints.tp allows 1, 2`: what the scenario forbids of the pins; empty where nothing."""
    rules, clauses = scenario.constraints, []
    for key, wanted in pins.values.items():
        allowed = getattr(rules, key)
        if key == "compression":  # nobody is forced to
            allowed = tuple(dict.fromkeys(("none", *allowed)))
        if key == "spread":
            if allowed is not None and set(allowed) != set(wanted):
                clauses.append(f"constraints.spread says {', '.join(allowed) or 'none'}")
        elif key == "patches":
            if allowed is not None and not set(wanted) <= set(allowed):
                clauses.append(f"constraints.spread cuts {', '.join(allowed) or 'nothing'} along patches")
        elif key == "encode_together":
            for name, (factor,) in wanted:
                factors = dict(allowed or ()).get(name, ())
                if factors and factor not in factors:
                    clauses.append(f"constraints.encode_together allows {name} {', '.join(map(str, factors))}")
        elif key == "modules":
            if allowed and {pin.module for pin in allowed} != {pin.module for pin in wanted}:
                clauses.append(f"constraints.modules says {', '.join(pin.module for pin in allowed)}")
        elif key == "prefetch":
            if wanted and allowed and not set(wanted) <= set(allowed):
                clauses.append(f"constraints.prefetch allows {', '.join(allowed)}")
        elif allowed and not set(allowed) & set(wanted):
            words = [str(value).lower() if isinstance(value, bool) else str(value) for value in allowed]
            clauses.append(f"constraints.{key} allows {', '.join(words)}")
    return " and ".join(clauses)


def unsearched(scenario: Scenario, pins: Pins) -> str:
    """`constraints.vp does not ask for chunks`: axes among the pins that a search takes only when asked."""
    rules, clauses = scenario.constraints, []
    chunks = allowed_chunks(scenario)
    if pins.of("vp") and not rules.vp and not set(pins.of("vp")) & set(chunks):
        clauses.append(f"constraints.vp does not ask for more than {max(chunks)} chunks per rank")
    if pins.of("prefetch") and rules.prefetch == ():
        clauses.append("constraints.prefetch does not ask for steps ahead")
    if pins.of("modules") and rules.modules == ():
        clauses.append("constraints.modules does not ask for ranks of their own")
    if any(factor > 1 for _, (factor,) in pins.of("encode_together")) and rules.encode_together == ():
        clauses.append("constraints.encode_together does not ask for several microbatches at once")
    split = rules.sequence_parallel or (scenario.technique.sequence_parallel,)
    if pins.of("sequence_parallel") and not set(pins.of("sequence_parallel")) & set(split):
        said = str(scenario.technique.sequence_parallel).lower()
        clauses.append(
            f"technique.sequence_parallel is {said}, and constraints.sequence_parallel does not ask for more"
        )
    return " and ".join(clauses)


def broken_rule(scenario: Scenario, pins: Pins) -> str:
    """Why no plan can have such degrees, whatever its memory; empty where nothing is known to speak against them."""
    batch, devices = scenario.global_batch, scenario.cluster.device_count
    unknown = [pool.device.name for pool in scenario.cluster.pools if pool.device.host_bytes_per_s is None]
    if pins.of("offload") and "none" not in pins.of("offload") and unknown:
        return f"the link of {unknown[0]} to host memory is not in the catalogue, so nothing is offloaded to it"
    without = [pool.device.name for pool in scenario.cluster.pools if pool.device.fp8_flops_per_s is None]
    if pins.of("fp8") and "none" not in pins.of("fp8") and without:
        return f"{without[0]} has no FP8 units"
    moes = [m.transformer.moe for m in scenario.model.modules if m.transformer is not None and m.transformer.moe]
    for key in ("ep", "etp"):
        if pins.of(key) and min(pins.of(key)) > 1 and not moes:
            return f"no module of {scenario.name} has experts, so {key} is 1"
    reasons = [undivided_by_tp(scenario, tp) for tp in pins.of("tp")]
    if reasons and all(reasons):
        return reasons[0]
    dividing = [dp for dp in pins.of("dp") if batch % dp == 0]
    if pins.of("dp") and not dividing:
        return division(f"the global batch {batch:,}", batch, "dp", pins.of("dp")[0])
    for name, (factor,) in pins.of("encode_together"):
        if batch % factor:  # microbatches divide it, and the factor divides them
            return division(f"the global batch {batch:,}", batch, f"{name}'s batch factor", factor)
    replicas = dividing or [1]
    sizes = pins.of("microbatch")
    if sizes and not any(batch // dp % size == 0 for dp in replicas for size in sizes):
        share = f"{batch:,} / dp {replicas[0]} samples of a replica" if dividing else f"the global batch {batch:,}"
        return division(share, batch // replicas[0], "microbatch", sizes[0])
    least = {key: min(pins.of(key)) for key in ("tp", "cp", "dp", "pp") if pins.of(key)}
    if math.prod(least.values()) > devices:
        product, equals = " x ".join(f"{key} {value}" for key, value in least.items()), " =" if len(least) > 1 else ":"
        return f"{product}{equals} {math.prod(least.values()):,} devices at least, the cluster has {devices:,}"
    return ""


def _own_ranks(
    text: str, key: str, words: Sequence[str], scenario: Scenario, before: tuple[OwnRanks, ...]
) -> tuple[OwnRanks, ...]:
    """What `modules=vision` or `vision.tp=1` adds to the modules with ranks of their own."""
    known = [module.name for module in scenario.model.modules if module.kind != "language_model"]
    module, dot, degree = key.partition(".")
    names = [module] if dot else [] if list(words) == ["none"] else list(words)
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or f"; modules that can: {listed(known)}"
            raise _error(text, f"{shown(name)} cannot have ranks of its own{hint}")
    found = {pin.module: pin for pin in before} | {
        name: OwnRanks(module=name) for name in names if name not in {pin.module for pin in before}
    }
    if dot:
        if degree not in OWN_DEGREES:
            raise _error(text, f"unknown key {shown(key)}; of a module's own ranks: {listed(OWN_DEGREES)}")
        degrees: dict[str, Any] = {degree: _values(text, degree, words, scenario)}
        found[module] = replace(found[module], **degrees)
    return tuple(found.values())


def _together(text: str, words: Sequence[str], scenario: Scenario) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """What `encode_together=4` or `encode_together=vision:4,audio:1` says: the factor of each named module."""
    every = [branch[0] for branch in branches(scenario)]
    known = [module.name for module in scenario.model.modules if module.kind != "language_model"]
    found: dict[str, tuple[int, ...]] = {}
    for word in words:
        name, colon, number = word.rpartition(":")
        if colon and name not in known:
            hint = did_you_mean(name, known) or f"; known: {listed(known)}"
            raise _error(text, f"encode_together: unknown {shown(name)}{hint}")
        (factor,) = _values(text, "microbatch", [number], scenario)
        found |= dict.fromkeys([name] if colon else every, (factor,))
    return tuple(found.items())


def _values(text: str, key: str, words: Sequence[str], scenario: Scenario) -> tuple[Any, ...]:
    if key in COUNTS:
        for word in words:
            if not (word.isascii() and word.isdigit()) or not 1 <= int(word) <= MAX_COUNT:
                raise _error(text, f"{key}: expected a count of at least 1, found {shown(word)}")
        return tuple(sorted({int(word) for word in words}))
    if key in ("spread", "prefetch"):
        known = [module.name for module in scenario.model.modules if module.kind != "language_model"]
        words = [] if list(words) == ["none"] else words
    else:
        known = list(WORDS[key])
    for word in words:
        if word not in known:
            raise _error(
                text, f"{key}: unknown {shown(word)}{did_you_mean(word, known) or f'; known: {listed(known, 40)}'}"
            )
    return tuple(word == "true" for word in words) if key == "sequence_parallel" else tuple(words)


def _error(text: str, message: str) -> InputError:
    return InputError(message, key=f"--why-not {shown(text)}")
