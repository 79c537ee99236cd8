"""Why a loss has no Hessian: an operator without a second derivative, or a loss that is no number; and in which module.

Both are found by running the model again with hooks, which nobody pays for as long as all is well.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

_NOT_IMPLEMENTED = re.compile(r"derivative for (\S+) is not implemented")
_ONCE = "once_differentiable"


def lacks_derivative(error: BaseException) -> bool:
    """Whether autograd says that something cannot be differentiated twice."""
    return isinstance(error, RuntimeError) and bool(_NOT_IMPLEMENTED.search(str(error)) or _ONCE in str(error))


def require_twice(gradients: Iterable[Tensor]) -> None:
    """Raise RuntimeError where a first gradient depends on a function that is marked once_differentiable.

    Autograd marks such a place, but raises only where its way to an input leads over the mark, which hangs beside the
    graph: asked for the derivative by parameters, it leaves the term out and says nothing.
    """
    if any(node.name() == "torch::autograd::Error" for node in _nodes(gradients)):
        raise RuntimeError(f"a second derivative of a function marked {_ONCE}")


def _nodes(tensors: Iterable[Tensor]) -> Iterator[Node]:
    waiting, seen = [tensor.grad_fn for tensor in tensors], set[Node]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [before for before, _ in node.next_functions]


def without_derivative(model: nn.Module, run: Callable[[], object], error: BaseException) -> str:
    """One sentence with the innermost module and the operator."""
    calls = _first_calls(model, run)
    place, names = model, ""
    while True:
        failing = next(((n, child) for n, child in _called(place, names, calls) if _fails(child, *calls[child])), None)
        if failing is None:
            break
        names, place = failing
    match = _NOT_IMPLEMENTED.search(str(error))
    operator = match[1] if match else _own_functions(place, calls) or "a function marked once_differentiable"
    where = f"module '{names}' ({type(place).__name__})" if names else f"the forward of {type(place).__name__}"
    return f"{operator} in {where} has no second derivative: give the model another implementation of it to measure"


def first_unsound(model: nn.Module, run: Callable[[], object]) -> str:
    """Where a forward first makes what is no number; an empty text where no module does."""
    found: list[str] = []

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, args: Any, result: Any) -> None:
            floats = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            if not found and not all(math.isfinite(float(leaf.detach().sum())) for leaf in floats):
                found.append(name)

        return look

    hooks = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            run()
    finally:
        for one in hooks:
            one.remove()
    return f"; first seen in the output of module '{found[0]}'" if found else ""


_Calls = dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]


def _called(module: nn.Module, name: str, calls: _Calls) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules inside that are called; lists of modules are not."""
    for key, child in module.named_children():
        own = f"{name}.{key}" if name else key
        if child in calls:
            yield own, child
        else:
            yield from _called(child, own, calls)


def _first_calls(model: nn.Module, run: Callable[[], object]) -> _Calls:
    """Arguments of the first call of each module."""
    calls: _Calls = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(module, (args, kwargs))

    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in model.modules()]
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            run()
    finally:
        for one in hooks:
            one.remove()
    return calls


def _fails(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this module alone cannot be differentiated twice."""
    try:
        inputs, squares = _squares(module, args, kwargs)
        first = torch.autograd.grad(squares, inputs, create_graph=True, allow_unused=True)
        bent = [gradient.square().sum() for gradient in first if gradient is not None and gradient.requires_grad]
        require_twice(gradient for gradient in first if gradient is not None)
        if bent:
            torch.autograd.grad(torch.stack(bent).sum(), inputs, allow_unused=True)
    except Exception as error:  # whatever else is wrong here is not what is looked for
        return lacks_derivative(error)
    return False


def _squares(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], Tensor]:
    """What to differentiate by, and what."""

    def fresh(leaf: Any) -> Any:
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.detach().clone().requires_grad_() if is_float else leaf

    args, kwargs = tree_map(fresh, (args, kwargs))
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    with sdpa_kernel(SDPBackend.MATH):
        result = module(*args, **kwargs)
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    inputs = [*given, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
    return inputs, torch.stack([leaf.square().sum() for leaf in made]).sum()


def _own_functions(module: nn.Module, calls: _Calls) -> str:
    """The name of a `torch.autograd.Function` in the module's graph."""
    try:
        _, squares = _squares(module, *calls[module])
    except Exception:  # a user's module may refuse to run alone in any way: then it is not the one that is named
        return ""
    for node in _nodes([squares]):
        if any(base.__name__ == "BackwardCFunction" for base in type(node).__mro__):  # a Function of Python's
            return node.name().removesuffix("Backward")
    return ""
