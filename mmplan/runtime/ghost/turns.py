"""Opens and closes the pieces of a stage in their turns (`slots.py`) while the model's own forward and autograd run.

In a backward, units take their turns against the order of their calls: autograd runs what was made later first, so that
by the first gradient of a unit's outputs every unit called after it is done.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from mmplan.errors import RunError
from mmplan.runtime.ghost.slots import ALWAYS, Slots
from mmplan.runtime.state import StageState


class Turns:
    """Of one stage. Args: slots: none where nothing of the stage is shared out layer by layer."""

    def __init__(self, state: StageState, slots: Slots | None) -> None:
        self._state = state
        self._slots = slots or Slots(pieces={}, turns=(), returning=frozenset())
        self._waiting: list[str] = []  # whose turn is to come in this pass
        self._open: str | None = None  # whose turn it is in this backward
        self._around: Callable[[], AbstractContextManager[None]] = nullcontext

    @contextmanager
    def forward(self, around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """A forward of the stage; what it and each unit do is inside `around()`, entered with open weights."""
        self._around = around
        with self._pass(self._slots.turns, backward=False), around():
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A backward of the stage."""
        turns = [slot for slot in reversed(self._slots.turns) if slot in self._slots.returning]
        with self._pass(turns, backward=True):
            yield
            self._close()

    @contextmanager
    def at_work(self, unit: str) -> Iterator[None]:
        """The forward of a unit."""
        if unit not in self._slots.turns:
            yield
            return
        self._reach(unit, backward=False)
        self._state.enter(unit, backward=False)
        with self._around():
            yield
        self._state.leave(unit, backward=False)

    def marked(self, unit: str, result: Any, arguments: Any) -> Any:
        """A unit's result, whose backward begins with the turn of the unit."""
        if unit not in self._slots.turns:
            return result
        given = {id(leaf) for leaf in tree_leaves(arguments)}

        def mark(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.requires_grad:
                return leaf
            # Only what is made here comes in its turn.
            made = leaf.view_as(leaf) if leaf.is_leaf or id(leaf) in given else leaf
            made.register_hook(lambda _: self._returned(unit))  # type: ignore[no-untyped-call]
            return made

        return tree_map(mark, result) if torch.is_grad_enabled() else result

    def _returned(self, unit: str) -> None:
        if self._open == unit:
            return
        self._close()
        self._reach(unit, backward=True)
        self._state.enter(unit, backward=True)
        self._open = unit

    def _close(self) -> None:
        if self._open is not None:
            self._state.leave(self._open, backward=True)
        self._open = None

    @contextmanager
    def _pass(self, turns: list[str] | tuple[str, ...], *, backward: bool) -> Iterator[None]:
        always = ALWAYS in turns
        self._waiting = [slot for slot in turns if slot != ALWAYS]
        if always:
            self._state.enter(ALWAYS, backward=backward)
        yield
        self._reach(None, backward=backward)
        if always:
            self._state.leave(ALWAYS, backward=backward)

    def _reach(self, unit: str | None, *, backward: bool) -> None:
        """Until it is the unit's turn; None: until nobody waits."""
        if unit is not None and unit not in self._waiting:
            raise RunError(
                f"'{unit}' is computed again or in another order than in the first batches, and the plan shares its "
                "weights or gradients out over replicas that exchange them in one order: set `constraints.sharding: "
                "[none, optimizer]` in the scenario and optimize again"
            )
        while self._waiting:
            slot = self._waiting.pop(0)
            if slot == unit:
                return
            self._state.enter(slot, backward=backward)
            self._state.leave(slot, backward=backward)
