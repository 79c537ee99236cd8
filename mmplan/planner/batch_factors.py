"""Which encoders of a model can run once for several microbatches of its language model, and for how many.

FlagScale calls the number the ViT batch factor: fewer, larger kernels and gathers of weights once for all of them, for
more activation memory and a later first forward of the language model.
"""

from itertools import product

from mmplan.errors import InputError
from mmplan.planner.branches import branches
from mmplan.scenario.scenario import Scenario

FACTORS = (1, 2, 4, 8)  # where constraints leave the choice


def runs_with(kind: str, microbatch: int, factor: int) -> bool:
    """Whether layers that run `factor` microbatches at once do so in this compute: the forward of the first of them and
    the backward of the last; in the others their stage hands out what they made, or takes what comes back."""
    return microbatch % factor == (0 if kind == "F" else factor - 1)


def batch_factors(scenario: Scenario) -> tuple[tuple[tuple[str, ...], int], ...]:
    """(modules, factor): which run so many microbatches at once while all others run each alone. All modules that hang
    together in front of a language model (an encoder, its projector) have one factor, and those of a plan that have one
    above 1 have the same.

    Raises:
        InputError: constraints name a module that reads a language model, or factors that no plan can have.
    """
    wanted = scenario.constraints.encode_together
    if wanted == ():
        return (((), 1),)
    allowed, schedules = _allowed(scenario), set(scenario.constraints.schedule)
    if schedules and "1f1b" not in schedules and schedules != {"gpipe"}:
        if all(1 in one for one in allowed.values()):
            return (((), 1),)
        named = ", ".join(scenario.constraints.schedule)
        message = f"several microbatches at once are run under 1f1b or gpipe, and constraints.schedule allows {named}"
        raise InputError(message, key="constraints.encode_together")
    if scenario.constraints.modules and not all(1 in one for one in allowed.values()):
        message = "plans with modules on ranks of their own (constraints.modules) run each microbatch alone"
        raise InputError(message, key="constraints.encode_together")
    factors = sorted({factor for one in allowed.values() for factor in one if factor > 1})
    found: list[tuple[tuple[str, ...], int]] = [((), 1)] if all(1 in one for one in allowed.values()) else []
    for factor in factors:
        ways = [[way for way, one in (((), 1), (branch, factor)) if one in of] for branch, of in allowed.items()]
        found += [(tuple(name for branch in way for name in branch), factor) for way in product(*ways) if any(way)]
    if not found:
        named = "; ".join(f"{' and '.join(branch)}: {_names(of)}" for branch, of in allowed.items())
        raise InputError(
            f"all encoders of a plan that run several microbatches at once run equally many, and of {named} no number "
            f"is common to all that have to",
            key="constraints.encode_together",
        )
    return tuple(found)


def _allowed(scenario: Scenario) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Factors of each branch."""
    every, wanted = branches(scenario), scenario.constraints.encode_together
    if wanted is None:
        return dict.fromkeys(every, FACTORS)
    allowed: dict[tuple[str, ...], tuple[int, ...]] = dict.fromkeys(every, (1,))
    named: dict[tuple[str, ...], str] = {}
    for name, factors in wanted:
        branch = next((names for names in every if name in names), None)
        if branch is None:
            message = f"'{name}' reads a language model, microbatch by microbatch, and cannot run several at once"
            raise InputError(message, key=f"constraints.encode_together.{name}")
        if branch in named and set(factors or FACTORS) != set(allowed[branch]):
            message = (
                f"'{named[branch]}' and '{name}' hang together and have one factor: {_names(allowed[branch])} and "
            )
            raise InputError(message + _names(factors or FACTORS), key=f"constraints.encode_together.{name}")
        allowed[branch], named[branch] = factors or FACTORS, name
    return allowed


def _names(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
