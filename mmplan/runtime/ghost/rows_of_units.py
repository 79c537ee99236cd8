"""How units run on some rows of a sequence: over context-parallel ranks (`row_trials.py`), or over tensor-parallel ones
where these have rows of what they do not split along width (`sequence_trials.py`)."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor

from mmplan.runtime.ghost.cut_rows import Follow
from mmplan.runtime.ghost.recording import Call


class RowsOfUnits(Protocol):
    """Of one rank. Attributes: loss_parts: ranks that compute a loss alike, each for a part of its gradients."""

    @property
    def loss_parts(self) -> int: ...

    def size(self, rows: int) -> int:
        """Rows of a rank, those included that fill it up."""

    def look(self, calls: Iterable[Call]) -> None:
        """Try what calls have that none before had. Collective over the ranks with other rows."""

    def on_own(
        self, call: Call, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Callable[..., Any], Any, Any]:
        """The forward of a unit on the rank's rows, and its arguments so cut."""

    def follow(self, rows: int) -> Follow:
        """What glue does with outputs of so many rows."""

    def whole(self, x: Tensor, rows: int) -> Tensor:
        """All rows of an output. Collective."""
