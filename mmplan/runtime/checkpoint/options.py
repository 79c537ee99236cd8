"""What a user asks of the checkpoints of a run."""

from dataclasses import dataclass, replace
from pathlib import Path

DEFAULT_KEEP = 3  # a damaged one and the one before it still leave one


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    """Where a run keeps checkpoints and what it goes on from.

    Attributes:
        folder: where they are written; None: nowhere.
        every: steps between two; the end of the run has one too, and alone where this is None.
        keep: how many of the newest stay.
        resume: the folder whose newest whole checkpoint the run goes on from; None: it starts anew.
        required: there has to be one; else a run without any starts anew.
    """

    folder: Path | None = None
    every: int | None = None
    keep: int = DEFAULT_KEEP
    resume: Path | None = None
    required: bool = False

    def resolved(self) -> "Checkpoints":
        """With absolute paths."""
        return replace(self, folder=self.folder and self.folder.resolve(), resume=self.resume and self.resume.resolve())
