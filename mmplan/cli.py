"""The command line: its commands, errors as one sentence, exit codes.

Commands are in `mmplan/commands`, each a straight line from files to output. Heavy imports stand inside them, so that
`mmplan --help` answers at once. Results go to stdout, progress to stderr; every command also writes one versioned
document with `--json FILE` (`-` for stdout, and nothing else there).
Exit codes: 0 done, 1 a threshold or check missed, 2 bad input, 3 proved infeasible, 4 no plan within the limit.
"""

import gc
import os
import sys

import typer

from mmplan.commands.checkpoints import checkpoints
from mmplan.commands.doctor import doctor
from mmplan.commands.explore import pareto, replan, sweep
from mmplan.commands.failures import report_error, write_error
from mmplan.commands.formats import export, import_
from mmplan.commands.launch import launch
from mmplan.commands.lists import hardware, schema
from mmplan.commands.plans import check, compare, data, fit, optimize, simulate
from mmplan.commands.runs import backtest, calibrate, execute, validate
from mmplan.commands.sensitivity import sensitivity
from mmplan.errors import CheckError, EndedError, MmplanError, RunError
from mmplan.runtime.torchrun import under_torchrun

# New objects between two looks for garbage, 700 by default: a search makes millions that live until its end.
COLLECT_EVERY = 100_000

app = typer.Typer(
    name="mmplan",
    help="Certified parallel plans for multimodal training: optimize, simulate, compare, check, execute, validate.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done, 1 threshold or check missed, 2 bad input, 3 proved infeasible, 4 no plan in the limit.",
)

COMMANDS = (
    *(optimize, simulate, compare, check, execute, validate),
    *(
        sweep,
        pareto,
        replan,
        fit,
        data,
        backtest,
        calibrate,
        sensitivity,
        checkpoints,
        doctor,
        import_,
        export,
        launch,
        schema,
        hardware,
    ),
)

for command in COMMANDS:  # in the order of --help
    app.command(command.__name__.rstrip("_"))(command)


def main() -> None:
    """Run a command and turn errors that a user can cause into one sentence and an exit code."""
    if not under_torchrun():  # tensors of a training step must not wait
        gc.set_threshold(COLLECT_EVERY)
    try:
        app()
    except SystemExit as stop:
        if stop.code == 130:
            sys.stderr.write("interrupted\n")
        if stop.code == 2:  # the parser has told the user what is wrong
            write_error("bad_input", "wrong options or arguments, see --help of the command")
        raise
    except MmplanError as error:
        failed = isinstance(error, CheckError | RunError)
        status = {3: "infeasible", 4: "no_plan"}.get(error.exit_code, "bad_input")
        report_error("failed" if failed else status, str(error), document=not isinstance(error, EndedError))
        _exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or closing stdout fails again at exit
        sys.exit(0)


def _exit(code: int) -> None:
    """Straight out under torchrun: threads of a communication library must not keep a failed process alive."""
    if not under_torchrun():
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
