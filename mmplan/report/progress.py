"""Progress of a search or a run, as one live line on stderr."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from mmplan.planner.result import Progress
from mmplan.report.console import stderr_console
from mmplan.units import format_seconds

_LINE_INTERVAL_S = 10.0  # between lines in a log file


@contextmanager
def search_progress(name: str) -> Iterator[Callable[[Progress], None]]:
    """Yields what `optimize` reports to: best plan, bound, gap and the configuration worked on."""
    with stderr_console().status(f"planning {name}") as status:
        yield lambda state: status.update(f"planning {name}: {_search_text(state)}")


def _search_text(state: Progress) -> str:
    if not state.enumerated:
        return f"{state.doing}; {state.wall_s:.1f} s"
    best = "no plan yet" if state.objective_s is None else f"best {format_seconds(state.objective_s)}"
    gap = "" if state.gap is None else f", gap {state.gap:.2%}"
    counts = f"{state.solved} of {state.enumerated} solved"
    return f"{best}, bound {format_seconds(state.bound_s)}{gap}; {counts}; {state.doing}; {state.wall_s:.1f} s"


@contextmanager
def points_progress(name: str) -> Iterator[tuple[Callable[[Progress], None], Callable[[str], None]]]:
    """Yields what the searches report to, and what hears which points are done, such as `3 of 8 points done`."""
    console = stderr_console()
    with console.status(f"planning {name}") as status:
        title = f"planning {name}"

        def show(state: Progress) -> None:
            status.update(f"{title}: {_search_text(state)}")

        def tell(done: str) -> None:
            nonlocal title
            title = f"planning {name}, {done}"
            status.update(title)
            if not console.is_terminal:
                console.print(title, markup=False, highlight=False, soft_wrap=True)

        yield show, tell


@contextmanager
def run_progress(
    name: str, steps: int, *, shown: bool = True
) -> Iterator[tuple[Callable[[int, float, Mapping[str, float]], None], Callable[[str], None]]]:
    """Yields what `execute` reports each finished step to; where stderr is no terminal, lines now and then. And what
    hears notes, each of which is a line.

    Args:
        shown: False for all processes of a run but one, which would write over each other.
    """
    console = stderr_console(quiet=not shown)
    told_s = time.monotonic()
    with console.status(f"running {name}: starting processes") as status:

        def show(step: int, step_time_s: float, losses: Mapping[str, float]) -> None:
            nonlocal told_s
            values = ", ".join(f"{module} {loss:.4f}" for module, loss in losses.items())
            loss = f", loss {values}" if values else ""
            text = f"running {name}: step {step + 1} of {steps}, {format_seconds(step_time_s)}{loss}"
            status.update(text)
            if not console.is_terminal and (step + 1 == steps or time.monotonic() - told_s >= _LINE_INTERVAL_S):
                told_s = time.monotonic()
                console.print(text, markup=False, highlight=False, soft_wrap=True)

        yield show, lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def calibration_progress() -> Iterator[Callable[[str], None]]:
    """Yields what `calibrate` reports to: the round and the kind of operator."""
    console = stderr_console()
    with console.status("calibrating") as status:

        def show(text: str) -> None:
            status.update(f"calibrating: {text}")
            if not console.is_terminal:
                console.print(f"calibrating: {text}", markup=False, highlight=False, soft_wrap=True)

        yield show
