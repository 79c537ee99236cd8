"""Everything a user can cause, each with the exit code the command ends with."""

from pathlib import Path


class MmplanError(Exception):
    """Base of all errors that a user's input or cluster can cause; `exit_code` ends the command."""

    exit_code = 2


class InputError(MmplanError):
    """A file or an option is wrong: one sentence, with file, line and key path where they are known.

    Args:
        message: what was expected and what was found, with the arithmetic.
        file: the file that was read.
        line: its 1-based line.
        key: dotted path of the key, for example `model.modules.vision.layers`.
    """

    def __init__(
        self, message: str, *, file: Path | str | None = None, line: int | None = None, key: str | None = None
    ) -> None:
        self.message, self.file, self.line, self.key = message, file, line, key
        place = str(file) if file is not None else ""
        place += f":{line}" if line is not None else ""
        parts = [part for part in (place, key, message) if part]
        super().__init__(": ".join(parts))


class ImpossibleError(InputError):
    """What an option or a file asks for no run can have, whatever else is chosen: the same that a search proves."""

    exit_code = 3


class CostModelError(MmplanError):
    """A cost model was asked for something it has no source for."""


class CheckError(MmplanError):
    """A plan, schedule or program breaks a rule, or a threshold was missed."""

    exit_code = 1


class InfeasibleError(MmplanError):
    """Proved: no plan exists. Names the resource that binds and the nearest change that would fit."""

    exit_code = 3


class NoPlanFoundError(MmplanError):
    """A limit was hit before any plan was found; nothing is proved."""

    exit_code = 4


class RunError(MmplanError):
    """A distributed run failed: rank, host, action and cause."""

    exit_code = 1


class EndedError(RunError):
    """This rank of a run ended because another one failed, which has reported that."""
