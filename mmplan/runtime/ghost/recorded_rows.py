"""What glue does, in a recording, with outputs of units whose rows ranks may share: followed, or needed whole."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from mmplan.runtime.ghost.cut_rows import CutRows, Follow, cut_rows, plain_of
from mmplan.runtime.ghost.unit_rows import has_rows


def row_arguments(arguments: Sequence[Any], rows: int) -> dict[int, tuple[int, bool]]:
    """As a call has them (`Call.row_arguments`)."""
    return {
        position: (leaf.numel(), isinstance(leaf, CutRows))
        for position, leaf in enumerate(arguments)
        if has_rows(leaf, rows)
    }


Output = tuple[str, int, int]  # a unit, the number of its call, and a leaf of what that returned


class RecordedRows:
    """Args: parts: ranks have parts of losses of rows, and of gradients of weights in glue.

    Attributes:
        cut: outputs with rows.
        whole: those that glue needs whole.
        summed_bytes: of losses of rows.
    """

    def __init__(self, *, parts: bool) -> None:
        self._parts = parts
        self.cut = set[Output]()
        self.whole = set[Output]()
        self.summed_bytes = 0

    def plain(self, arguments: Any, *, along: bool) -> Any:
        """Arguments of a unit as its forward takes them. Args: along: it runs on rows, and takes all in their order."""
        for leaf in tree_leaves(arguments):
            if isinstance(leaf, CutRows) and not (along and leaf.ids is None):
                leaf.follow.whole()
        return tree_map(plain_of, arguments)

    def carried(self, unit: str, call: int, result: Any, rows: int) -> Any:
        """What a unit that runs on rows returned, as glue holds it."""
        leaves, spec = tree_flatten(result)
        for slot, leaf in enumerate(leaves):
            if has_rows(leaf, rows):
                self.cut.add((unit, call, slot))
                leaves[slot] = cut_rows(leaf, None, self._follow((unit, call, slot), rows))
        return tree_unflatten(leaves, spec)

    def _follow(self, output: Output, rows: int) -> Follow:
        return Follow(
            place=torch.arange(rows), whole=lambda: self.whole.add(output), total=self._total if self._parts else None
        )

    def _total(self, loss: Tensor) -> Tensor:
        self.summed_bytes += loss.nbytes
        return loss
