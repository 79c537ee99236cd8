"""Health of a run of `mmplan execute`: its losses, and where in its stages a number was none, as readings."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import mmplan
from mmplan.errors import InputError
from mmplan.runtime.finite import Unsound, order
from mmplan.runtime.health import loss, overflow
from mmplan.runtime.health.judge import Judge, Value
from mmplan.runtime.health.loss import LossRatio
from mmplan.runtime.health.readings import write_header, write_readings
from mmplan.runtime.health.rules import RULES


class RunHealth:
    """Writes one file, on rank 0; `modalities`: of stages.

    Raises:
        InputError: the file cannot be written.
    """

    def __init__(self, path: Path, modalities: Mapping[int, str]) -> None:
        self._modalities, self._judge, self._ratio = modalities, Judge(RULES, 0), LossRatio()
        try:
            self._file = path.open("w")
        except OSError as error:
            raise InputError(f"cannot write: {error.strerror}", file=path) from error
        versions = {"mmplan_version": mmplan.__version__, "torch_version": torch.__version__}
        write_header(self._file, {**versions, "rank": 0, "interval": 1})

    def take(self, step: int, losses: Mapping[str, float], unsound: Sequence[Unsound | None]) -> None:
        """Take a step before it is judged, which may end the run.

        Args:
            losses: by module, as they are.
            unsound: what each rank first saw that was no number.
        """
        values = [*self._overflow(unsound), *self._loss(losses)]
        write_readings(self._file, [self._judge.reading(step, value) for value in values])

    def close(self) -> None:
        self._file.close()

    def _overflow(self, unsound: Sequence[Unsound | None]) -> list[Value]:
        """The first in the order of computing; the path is where the other ranks saw it."""
        seen = sorted(((order(one), rank, one) for rank, one in enumerate(unsound) if one), key=lambda item: item[:2])
        if not seen:
            return []
        _, rank, first = seen[0]
        detail: dict[str, float | str | None] = {
            "modality": self._modalities.get(first.stage, ""),
            "because": "backward" if first.microbatch < 0 else "forward",
            "path": " > ".join(f"{one.what} (rank {at}, stage {one.stage})" for _, at, one in seen),
            "rank": float(rank),
        }
        if first.microbatch >= 0:
            detail["microbatch"] = float(first.microbatch)
        return [Value(overflow.RULE.monitor, first.what, float(len(seen)), detail)]

    def _loss(self, losses: Mapping[str, float]) -> list[Value]:
        if not losses:
            return []
        total = sum(losses.values())
        ratio = self._ratio.update(total) if math.isfinite(total) else math.nan
        return [] if ratio is None else [Value(loss.RULE.monitor, "loss", ratio, {"loss": total})]
