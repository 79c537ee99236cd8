"""Buffers that a model's forward changes, as running statistics are.

Dry runs leave them as they were, a forward that is computed once more does not change them once more, and where ranks
that compute of unlike samples have each their own, this is told.
"""

import inspect
from collections.abc import Collection, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

MOST_TOLD = 3  # modules whose buffers are listed one by one


@contextmanager
def dry_run(model: nn.Module) -> Iterator[set[str]]:
    """Inside, the model works on copies of its buffers; the set has behind it the names of those that it changed."""
    changed = set[str]()
    with on_copies(model, _copies(model, {name for name, _ in model.named_buffers(remove_duplicate=False)})):
        before = state_of(model)
        yield changed
        changed |= changed_buffers(model, before)


def computed_again(
    unit: nn.Module, names: Set[str]
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a unit's forward and of its recomputation, which finds these buffers as that forward did."""
    return nullcontext(), on_copies(unit, _copies(unit, names))


@contextmanager
def on_copies(module: nn.Module, copies: Mapping[str, Tensor]) -> Iterator[None]:
    """Put in the place of buffers, which are put back. Values written back would count as changes for autograd."""
    own = {name: module.get_buffer(name) for name in copies}
    _put(module, copies)
    try:
        yield
    finally:
        _put(module, own)


def state_of(module: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """Each buffer, and how often it was written to."""
    return {name: (buffer, buffer._version) for name, buffer in module.named_buffers(remove_duplicate=False)}


def changed_buffers(module: nn.Module, before: Mapping[str, tuple[Tensor, int]]) -> set[str]:
    """Names of those that were written to, or replaced, since."""
    now = state_of(module)
    found = {
        name
        for name, (buffer, version) in before.items()
        if name in now and (now[name][0] is not buffer or now[name][1] != version)
    }
    for owner in {name.rpartition(".")[0] for name in found}:
        if isinstance(
            module.get_submodule(owner), _NormBase
        ):  # on tensors without memory it writes to none of the rest
            found |= {name for name in now if name.rpartition(".")[0] == owner}
    return found


def told_own_buffers(model: nn.Module, changed: Collection[str], ranks: str) -> tuple[str, ...]:
    """A sentence on saved buffers of the model, if any, that ranks have each their own. Args: ranks: which."""
    owners: dict[str, list[str]] = {}
    for name in changed:
        owner, _, key = name.rpartition(".")
        owners.setdefault(owner, []).append(key)
    if not owners:
        return ()
    listed = [f"{', '.join(keys)} of {_placed(model, owner)}" for owner, keys in [*owners.items()][:MOST_TOLD]]
    more = f" and those of {len(owners) - MOST_TOLD} more modules" if len(owners) > MOST_TOLD else ""
    return (
        f"a forward changes buffers: {'; '.join(listed)}{more}: {ranks} have each their own, and those of the first "
        "are saved: freeze them (`eval()` in `model()`), or take a norm that keeps no running statistics",
    )


def _placed(model: nn.Module, name: str) -> str:
    """A module by its name, and where the code is that runs it: the nearest around it that is not of torch itself."""
    path, within = name, name
    while type(model.get_submodule(within)).__module__.startswith("torch.") and within:
        within = within.rpartition(".")[0]
    code = inspect.unwrap(type(model.get_submodule(within)).forward).__code__
    return f"{path or 'the model'} ({code.co_filename}:{code.co_firstlineno})"


def _copies(module: nn.Module, names: Set[str]) -> dict[str, Tensor]:
    """Of buffers that modules share one."""
    own = {name: buffer for name, buffer in module.named_buffers(remove_duplicate=False) if name in names}
    copies = {id(buffer): buffer.detach().clone() for buffer in own.values()}
    return {name: copies[id(buffer)] for name, buffer in own.items()}


def _put(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        owner, _, key = name.rpartition(".")
        module.get_submodule(owner)._buffers[key] = buffer
