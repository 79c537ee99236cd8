"""Hessian-vector products of one layer: H v is the gradient of (gradient . v), by autograd twice (Pearlmutter 1994).

The Gauss-Newton variant leaves out the curvature of the model itself: G v = J' (H_z (J v)) with J the derivative of the
logits by the parameters and H_z the Hessian of the loss by the logits (Schraudolph 2002). It has no negative
eigenvalue. Attention runs by torch's MATH kernels, the only ones with a second derivative.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmplan.errors import InputError
from mmplan.runtime.hessian.subject import Outputs, Piece

Sum = Callable[[Tensor], Tensor]  # of a tensor over all processes


def targets_of(pieces: Sequence[Piece]) -> dict[str, float]:
    """What the losses of a branch are means over, by name."""
    totals: dict[str, float] = {}
    for piece in pieces:
        for name, count in piece.targets.items():
            totals[name] = totals.get(name, 0.0) + count
    return totals


class Curvature:
    """The Hessian of a branch's loss over one layer's parameters, as products with flat fp32 vectors.

    Args:
        pieces: those of the branch that this process computes.
        targets: those of all processes' pieces, see `targets_of`.
        keep: keep each piece's graph, so that a product is one backward; else it is made again for each product, which
            takes a forward and a backward more and the memory of one piece instead of all.
        total: sums a tensor over all processes.

    Attributes:
        size: parameters of the layer.
        loss: of the branch.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        targets: Mapping[str, float],
        parameters: Sequence[nn.Parameter],
        *,
        gauss_newton: bool = False,
        keep: bool = True,
        total: Sum = lambda tensor: tensor,
    ) -> None:
        self.size = sum(parameter.numel() for parameter in parameters)
        self._parameters, self._targets, self._total = tuple(parameters), targets, total
        self._gauss_newton = gauss_newton
        self._pieces = tuple(pieces)
        self._losses = [0.0] * len(pieces)
        self._graphs: list[Callable[[], _Graph]] = []
        for number, piece in enumerate(pieces):  # once in any case, so that `loss` is known before any product
            graph = self._graph(piece, number)
            self._graphs.append(partial(_kept, graph) if keep else partial(self._graph, piece, number))
            del graph
        where = parameters[0]
        self.loss = float(total(torch.tensor([sum(self._losses)], dtype=torch.float64, device=where.device)))

    def __call__(self, vector: Tensor) -> Tensor:
        """H v, summed over all processes."""
        pieces = torch.split(vector, [parameter.numel() for parameter in self._parameters])
        parts = [piece.view_as(parameter) for piece, parameter in zip(pieces, self._parameters, strict=True)]
        product = torch.zeros_like(vector)
        for graph in self._graphs:
            for gradients in graph()(parts):
                product += torch.cat([gradient.reshape(-1) for gradient in gradients])
        return self._total(product)

    def first_gradients(self) -> Iterator[Tensor]:
        """What products are gradients of; of one graph after the other."""
        for graph in self._graphs:
            yield from graph().bent()

    def gradient(self) -> Tensor:
        """Of the branch's loss at the present values of the parameters, flat, summed over all processes."""
        gradient = torch.zeros(self.size, device=self._parameters[0].device)
        for piece in self._pieces:
            with sdpa_kernel(SDPBackend.MATH):
                outputs = piece.run()
            loss = self._loss(outputs)
            if loss.requires_grad:
                gradient += torch.cat([part.reshape(-1) for part in _gradients([loss], self._parameters)])
        return self._total(gradient)

    def _shares(self, outputs: Outputs) -> dict[str, Tensor]:
        """What the forward adds to the branch's losses."""
        return {name: loss / self._targets[name] for name, loss in outputs.losses.items() if self._targets[name]}

    def _loss(self, outputs: Outputs) -> Tensor:
        return sum(self._shares(outputs).values(), torch.zeros(()))

    def _graph(self, piece: Piece, number: int) -> "_Graph":
        with sdpa_kernel(SDPBackend.MATH):
            outputs = piece.run()
            shares = self._shares(outputs)
            self._losses[number] = float(sum(share.detach().double() for share in shares.values()))
            if self._gauss_newton:
                return _GaussNewton(shares, outputs, self._parameters)
            return _Hessian(self._loss(outputs), self._parameters)


class _Hessian:
    """One piece's."""

    def __init__(self, loss: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        gradients = _gradients([loss], parameters, create_graph=True) if loss.requires_grad else ()
        self._bent = [(place, g) for place, g in enumerate(gradients) if g.requires_grad]

    def bent(self) -> list[Tensor]:
        return [gradient for _, gradient in self._bent]

    def __call__(self, parts: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        if not self._bent:
            return []
        along = [parts[place] for place, _ in self._bent]
        return [_gradients([g for _, g in self._bent], self._parameters, along)]


class _GaussNewton:
    """One piece's. J v comes from two backwards: J' u is linear in u, and its derivative by u along v is J v."""

    def __init__(self, shares: Mapping[str, Tensor], outputs: Outputs, parameters: Sequence[nn.Parameter]) -> None:
        if outputs.logits is None:
            raise InputError("the Gauss-Newton matrix needs the model's logits, and its output has no tensor `logits`")
        self._parameters = parameters
        self._parts = []
        for name, loss in shares.items():
            logits = outputs.logits[name]
            if not logits.requires_grad:
                continue
            slope = torch.autograd.grad(loss, logits, create_graph=True)[0]
            dummy = torch.zeros_like(logits, requires_grad=True)
            transposed = _gradients([logits], parameters, [dummy], create_graph=True)
            self._parts.append((logits, slope, dummy, [(i, t) for i, t in enumerate(transposed) if t.requires_grad]))

    def bent(self) -> list[Tensor]:
        return [t for _, slope, _, transposed in self._parts for t in (slope, *(one for _, one in transposed))]

    def __call__(self, parts: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        found = []
        for logits, slope, dummy, transposed in self._parts:
            if not transposed or not slope.requires_grad:
                continue
            moved = _gradients([t for _, t in transposed], [dummy], [parts[i] for i, _ in transposed])[0]
            curved = _gradients([slope], [logits], [moved])[0]
            found.append(_gradients([logits], self._parameters, [curved]))
        return found


_Graph = _Hessian | _GaussNewton


def _kept(graph: _Graph) -> _Graph:
    return graph


def _gradients(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    along: Sequence[Tensor] | None = None,
    *,
    create_graph: bool = False,
) -> tuple[Tensor, ...]:
    """Zeros where an input has no part in the outputs; the graph stays."""
    found: tuple[Tensor, ...] = torch.autograd.grad(
        list(outputs),
        list(inputs),
        None if along is None else list(along),
        retain_graph=True,
        create_graph=create_graph,
        allow_unused=True,
        materialize_grads=True,
    )
    return found
