"""Options of `mmplan execute` that another command passes on: read when that is written, not hours later in a queue."""

from collections.abc import Sequence
from dataclasses import dataclass

import typer

from mmplan.commands.runs import execute
from mmplan.errors import InputError

_RESTARTS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecuteOptions:
    """The options as they stand, and what of them decides how many processes there are."""

    arguments: tuple[str, ...]
    rehearse: bool
    resumes: bool  # a run that is started again goes on from its last checkpoint


def execute_options(arguments: Sequence[str]) -> ExecuteOptions:
    """The options behind `--`.

    Raises:
        InputError: an option that `mmplan execute` does not have or that a launcher cannot use.
    """
    app = typer.Typer(add_completion=False)
    app.command("execute")(execute)
    command = typer.main.get_command(app)
    if "--help" in arguments:
        raise InputError("--help is no option to launch with: run mmplan execute --help")
    try:
        context = command.make_context("mmplan execute", ["plan.json", *arguments])
    except Exception as error:
        # The parser's errors share no base that typer exports; they all know how to say what is wrong.
        said = getattr(error, "format_message", None)
        if said is None:
            raise
        raise InputError(f"mmplan execute would not take the options behind --: {said()}") from error
    if context.params["local"] is not None:
        raise InputError("--local starts processes on this machine: leave it out, the launcher starts them")
    chosen = context.params
    return ExecuteOptions(
        arguments=tuple(arguments),
        rehearse=bool(chosen["rehearse"]),
        resumes=bool(chosen["resume"] and chosen["checkpoint"] and chosen["every"]),
    )


def restarts_of(options: ExecuteOptions, wanted: int | None) -> int:
    """How often a launcher starts a failed run again: as wanted, else a few times where it goes on.

    Raises:
        InputError: it would begin anew each time.
    """
    if wanted and not options.resumes:
        raise InputError(
            f"--restarts {wanted}: a run that is started again would begin anew; let it go on by options behind --: "
            "--checkpoint FOLDER --every STEPS --resume"
        )
    return (_RESTARTS if options.resumes else 0) if wanted is None else wanted
