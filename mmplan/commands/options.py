"""Options and arguments that several commands share."""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mmplan.errors import InputError
from mmplan.runtime.thresholds import Thresholds
from mmplan.units import parse_seconds


def seconds(text: str | float) -> float:
    """An option such as `30 ms`, in seconds; a number alone is of seconds."""
    try:
        alone = isinstance(text, float) or re.fullmatch(r"\s*-?\d+(\.\d+)?\s*", text) is not None
        value = float(text) if alone else parse_seconds(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if value < 0:
        raise typer.BadParameter(f"'{text}' is negative, a duration is not")
    return value


def refuse_without_effect(context: typer.Context, needs: Mapping[str, tuple[bool, str]]) -> None:
    """An option that is written and does nothing in this call was meant for something.

    Args:
        needs: parameter -> whether there is what it works on, and the option that makes it.

    Raises:
        InputError: the first such option.
    """
    for name, (there, needed) in needs.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and not there:
            raise InputError(f"--{name.replace('_', '-')} has no effect without {needed}")


def json_path(json_file: str | None) -> Path | None:
    """The file of `--json`, None when there is none or it is stdout."""
    return None if json_file in (None, "-") else Path(str(json_file))


JsonFile = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write a JSON document; - for stdout.")]
ALLOWED = Thresholds()
AllowedOption = partial(typer.Option, min=0.0)
SecondsOption = partial(typer.Option, parser=seconds, metavar="SECONDS")
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")]
ScenarioFile = Annotated[Path, typer.Argument(metavar="SCENARIO", help="A scenario YAML file.")]
Gap = Annotated[float, typer.Option(min=0.0, max=1.0, help="Each search stops when this gap is proven.")]
TimeLimit = Annotated[
    float,
    typer.Option(min=0.1, help="Seconds after which a search keeps its best plan so far; of optimize, all it does."),
]
ScheduleSearch = Annotated[
    float, typer.Option(min=0.0, help="Counted seconds to look for a better schedule of each best cut; 0: keep 1F1B.")
]
ObjectiveWord = Annotated[
    str,
    typer.Option("--objective", help="step-time, device-time, cost (of a token), devices (the fewest) or p90-time."),
]
LongestStep = Annotated[
    float | None,
    typer.Option("--deadline", parser=seconds, metavar="TIME", help="Longest step with the fewest devices: '12 s'."),
]
Seed = Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Same input and seed, same plans.")]
