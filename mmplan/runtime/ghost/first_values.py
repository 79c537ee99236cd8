"""First values of parameters without storage: what the model's own code does to make them is written down as it builds
the model, and done again, on real memory, for one parameter at a time where a rank holds it.

Random numbers depend on the seed and on the place of the draw among those of the model's code, so that they are the
same on every rank and under every plan, and copies of a layer remain copies.
"""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from mmplan.runtime.ghost.half_meta import CPU, META

MOST_KEPT = 1_000_000  # elements of a tensor that the code computed for real and puts into a parameter


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a tensor lies in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def of(self, flat: Tensor) -> Tensor:
        return flat.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One operation; its tensors are `_View`s.

    Args:
        result: which of its results the storage was made for, and how that lies in it, which on real memory may differ;
            None: it writes into the storage.
        draw: its place among operations that draw; None: it draws nothing.
    """

    run: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    result: tuple[int, _Layout] | None
    draw: int | None


@dataclass(slots=True, eq=False)
class _Log:
    """What was done to one storage. alive: while it is kept, no other storage has its address."""

    alive: UntypedStorage
    steps: list[_Step] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class _View:
    """A tensor on a storage as it was behind so many steps."""

    log: _Log
    steps: int
    layout: _Layout


class _Unknown:
    """A real tensor that is too large to be kept."""


class FirstValue:
    """How the model's code makes one parameter."""

    def __init__(self, view: _View) -> None:
        self._view = view

    @property
    def is_set(self) -> bool:
        """Whether the code gives it any value."""
        steps = self._view.log.steps[: self._view.steps]
        return any(not _leaves_empty(step.run) for step in steps)

    @property
    def is_known(self) -> bool:
        """Whether what the code does can be done again."""
        return _is_known(self._view, set())

    def value(self, seed: int) -> Tensor:
        """The value; draws are those of the seed."""
        return _Replay(seed).tensor(self._view).clone()


class Journal(TorchDispatchMode):
    """Inside, what is done to tensors without storage is written down."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._logs: dict[int, _Log] = {}
        self._draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        results = func(*args, **kwargs)
        given, made = tree_leaves((args, kwargs)), tree_leaves(results)
        if not any(map(_has_no_storage, (*given, *made))):
            return results
        draw = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            draw, self._draws = self._draws, self._draws + 1
        old_args, old_kwargs = ((), {}) if _leaves_empty(func) else tree_map(self._noted, (args, kwargs))
        for tensor in _written(func, args, kwargs):
            if _has_no_storage(tensor):
                self._log(tensor).steps.append(_Step(func, old_args, old_kwargs, None, draw))
        for index, tensor in enumerate(made):
            if _has_no_storage(tensor) and tensor.untyped_storage()._cdata not in self._logs:
                self._log(tensor).steps.append(_Step(func, old_args, old_kwargs, (index, _layout(tensor)), draw))
        return results

    def note_call(self, run: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """What a function would do to a tensor without storage that it is given, if it had one."""
        draw, self._draws = self._draws, self._draws + 1
        noted = tree_map(self._noted, arguments)
        for value in arguments.values():
            if _has_no_storage(value):
                self._log(value).steps.append(_Step(run, (), noted, None, draw))

    def keep(self, empty: Tensor, value: Tensor) -> None:
        """`empty` begins with a value that the code has computed for real."""
        first, result = value.detach().reshape(-1)[:1], (0, _layout(empty))
        if value.numel() > MOST_KEPT and bool((value == first).all()):
            step = _Step(torch.full, (tuple(value.shape), first.item()), {"dtype": value.dtype}, result, None)
        else:
            step = _Step(torch.clone, (_kept(value),), {}, result, None)
        self._log(empty).steps[:] = [step]

    def first_value(self, tensor: Tensor) -> FirstValue:
        return FirstValue(self._view(tensor))

    def _log(self, tensor: Tensor) -> _Log:
        storage = tensor.untyped_storage()
        return self._logs.setdefault(storage._cdata, _Log(storage))

    def _view(self, tensor: Tensor) -> _View:
        log = self._log(tensor)
        return _View(log, len(log.steps), _layout(tensor))

    def _noted(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._view(leaf) if _has_no_storage(leaf) else _kept(leaf)
        if isinstance(leaf, torch.Generator):
            return None  # the seed's own stands in for it
        return CPU if leaf == META and isinstance(leaf, torch.device) else leaf


class _Replay:
    """Steps done again on real memory; each storage once."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._done: dict[tuple[int, int], Tensor] = {}

    def tensor(self, view: _View) -> Tensor:
        key = id(view.log), view.steps
        if key not in self._done:
            self._done[key] = self._made(view)
        return view.layout.of(self._done[key])

    def _made(self, view: _View) -> Tensor:
        """A storage behind some of its steps, as bytes."""
        flat = torch.zeros(view.log.alive.nbytes(), dtype=torch.uint8, device=CPU)  # what code leaves as it finds it
        for step in view.log.steps[: view.steps]:
            if _leaves_empty(step.run):
                continue
            args, kwargs = tree_map(lambda leaf: self._real(leaf, view.log, flat), (step.args, step.kwargs))
            with nullcontext() if step.draw is None else seeded(f"{self._seed}/{step.draw}"):
                results = step.run(*args, **kwargs)
            if step.result is not None:
                index, layout = step.result
                layout.of(flat).copy_(tree_leaves(results)[index])
        return flat

    def _real(self, leaf: Any, log: _Log, flat: Tensor) -> Any:
        if not isinstance(leaf, _View):
            return leaf
        if leaf.log is log:
            return leaf.layout.of(flat)
        return self.tensor(leaf)


def _is_known(view: _View, seen: set[tuple[int, int]]) -> bool:
    if (id(view.log), view.steps) in seen:
        return True
    seen.add((id(view.log), view.steps))
    leaves = [leaf for step in view.log.steps[: view.steps] for leaf in tree_leaves((step.args, step.kwargs))]
    if not view.log.steps or any(isinstance(leaf, _Unknown) for leaf in leaves):
        return False
    return all(_is_known(leaf, seen) for leaf in leaves if isinstance(leaf, _View))


def _layout(tensor: Tensor) -> _Layout:
    return _Layout(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype)


def _leaves_empty(run: Any) -> bool:
    packet = getattr(run, "overloadpacket", None)
    return getattr(packet, "__name__", "") in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


def _has_no_storage(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device == META


def _kept(value: Tensor) -> Tensor | _Unknown:
    return value.detach().clone() if value.numel() <= MOST_KEPT and value.device == CPU else _Unknown()


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Tensors that an operation writes into, each storage once."""
    found: dict[int, Tensor] = {}
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor):
                    found[leaf.untyped_storage()._cdata] = leaf
    return list(found.values())


@contextmanager
def seeded(text: str) -> Iterator[None]:
    """The CPU's random numbers inside are those of a text, and outside as if nothing had been drawn; but where code
    inside sets a seed of its own, that holds on."""
    generator = torch.default_generator
    before, seed = generator.get_state(), zlib.crc32(text.encode())
    generator.manual_seed(seed)
    try:
        yield
    finally:
        if generator.initial_seed() == seed:
            generator.set_state(before)
