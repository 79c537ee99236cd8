"""Layers, or their attention alone, that keep only their inputs from forward to backward, and run once more when the
backward needs the rest."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmplan.runtime.batch import Microbatch

Result = TypeVar("Result")


def run_again(run: Callable[..., Result], inputs: Sequence[Tensor]) -> Result:
    """`run(*inputs)`, which draws no random numbers and of which autograd keeps `inputs` alone."""
    result: Result = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
    return result


def recomputed(module: nn.Module, inputs: Mapping[str, Tensor], batch: Microbatch) -> Tensor:
    """`module(inputs, batch)`, of which autograd keeps `inputs` alone (arXiv 1604.06174, section 4.1).

    The inputs go in one by one, because only then do hooks on saved tensors see them. No layer draws random numbers.
    """
    names = tuple(inputs)

    def run(*tensors: Tensor) -> Tensor:
        result: Tensor = module(dict(zip(names, tensors, strict=True)), batch)
        return result

    return run_again(run, tuple(inputs.values()))
