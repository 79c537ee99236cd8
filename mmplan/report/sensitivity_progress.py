"""Progress of a measurement of sensitivities: a bar on stderr, or a line now and then where that is no terminal."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mmplan.report.console import stderr_console
from mmplan.report.sensitivity import estimate_text
from mmplan.runtime.hessian.told import Estimate
from mmplan.runtime.hessian.values import Key, Value

_LINE_INTERVAL_S = 10.0  # between lines in a log file


class SensitivityProgress:
    """Hears a measurement (`processes.Listener`). Attributes: last: the estimate, once it is there."""

    def __init__(self, progress: Progress, *, dry_run: bool) -> None:
        self.last: Estimate | None = None
        self._dry_run = dry_run
        self._progress, self._task = progress, progress.add_task("measuring: loading", total=None)
        self._told_s = time.monotonic()

    def note(self, text: str) -> None:
        self._print(text)

    def estimate(self, estimate: Estimate) -> None:
        self.last = estimate
        if not self._dry_run:  # of which it is the result
            self._print(estimate_text(estimate))
        self._progress.update(self._task, total=estimate.values, description="measuring")

    def value(self, key: Key, value: Value, left: int) -> None:
        total = self.last.values if self.last is not None else left
        text = f"measuring: batch {key.batch}, {key.modality}, {key.layer}"
        self._progress.update(self._task, completed=total - left, description=text)
        if not self._progress.console.is_terminal and time.monotonic() - self._told_s >= _LINE_INTERVAL_S:
            self._told_s = time.monotonic()
            self._print(f"{text}: {total - left} of {total}")

    def _print(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def sensitivity_progress(*, shown: bool, dry_run: bool) -> Iterator[SensitivityProgress]:
    """Args: shown: False for all processes of a run but one."""
    console = stderr_console(quiet=not shown)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield SensitivityProgress(progress, dry_run=dry_run)
