"""Layers that keep only their inputs from forward to backward, and run once more when the backward needs the rest."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmplan.runtime.batch import Microbatch


def recomputed(module: nn.Module, inputs: Mapping[str, Tensor], batch: Microbatch) -> Tensor:
    """`module(inputs, batch)`, of which autograd keeps `inputs` alone (arXiv 1604.06174, section 4.1).

    The inputs go in one by one, because only then do hooks on saved tensors see them. No layer draws random numbers.
    """
    names = tuple(inputs)

    def run(*tensors: Tensor) -> Tensor:
        result: Tensor = module(dict(zip(names, tensors, strict=True)), batch)
        return result

    output: Tensor = checkpoint(run, *inputs.values(), use_reentrant=False, preserve_rng_state=False)
    return output
