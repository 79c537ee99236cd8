"""A module that calls experts one by one, each on its rows, made to send all of these to the experts' ranks at once.

Its own forward runs twice. First experts only take down what they are given; then they return what came back for it.
Other modules inside, the router and experts that all tokens share, run the first time, and the second time return the
same again. Gradients of rows pass through the first run, those of what is made of results through the second.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmplan.runtime.ghost.recording import replaced_forwards

Sent = Callable[[Tensor, Tensor], Tensor]  # rows [copies, width], expert numbers [copies, 1] -> results


class ListedExperts:
    """The forward of such a module. Args: members: experts; width: of a row; sent: what is done with all rows."""

    def __init__(self, module: nn.Module, members: Sequence[nn.Module], width: int, sent: Sent) -> None:
        self._forward, self._width, self._sent = module.forward, width, sent
        self._members = {str(index): member for index, member in enumerate(members)}
        inside = {id(member) for member in members}
        self._others = {
            name: child
            for name, child in module.named_children()
            if id(child) not in inside and not inside & {id(part) for part in child.modules()}
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given: dict[str, Tensor] = {}
        results: list[Any] = []

        def taking(name: str, _: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
            def called(rows: Tensor) -> Tensor:
                if name in given:
                    raise ValueError(f"the expert {name} is called twice")
                given[name] = rows
                return torch.zeros_like(rows)

            return called

        def keeping(_: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def called(*inner: Any, **named: Any) -> Any:
                results.append(forward(*inner, **named))
                return results[-1]

            return called

        with replaced_forwards(self._members, taking), replaced_forwards(self._others, keeping):
            self._forward(*args, **kwargs)
        back = self._results(given, args)
        with (
            replaced_forwards(self._members, lambda name, _: lambda rows: back[name].view(rows.shape)),
            replaced_forwards(self._others, lambda _, __: lambda *inner, **named: results.pop(0)),
        ):
            return self._forward(*args, **kwargs)

    def _results(self, given: dict[str, Tensor], args: Any) -> dict[str, Tensor]:
        names = sorted(given, key=int)
        rows = [given[name].reshape(-1, self._width) for name in names]
        counts = [len(one) for one in rows]
        like = rows[0] if rows else next(iter(self._members["0"].parameters()))
        everything = torch.cat(rows) if rows else like.new_zeros(0, self._width)
        numbers = torch.tensor([int(name) for name in names], dtype=torch.int64, device=like.device)
        numbers = numbers.repeat_interleave(torch.tensor(counts, dtype=torch.int64, device=like.device))
        made = self._sent(everything, numbers.unsqueeze(1))
        return dict(zip(names, torch.split(made, counts), strict=True))
