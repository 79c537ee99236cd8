"""Selective recomputation of models of others: what a unit asks of `scaled_dot_product_attention` is computed once more
in the backward, and of it autograd keeps queries, keys and values alone (arXiv 2205.05198, section 5)."""

from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

_DROPOUT = 4  # position of `dropout_p`


def recompute_attention(unit: nn.Module) -> None:
    """Let its forward drop attention."""
    forward = unit.forward

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _Again():
            return forward(*args, **kwargs)

    unit.forward = run


class _Again(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        dropout = kwargs.get("dropout_p", args[_DROPOUT] if len(args) > _DROPOUT else 0.0)
        return checkpoint(func, *args, use_reentrant=False, preserve_rng_state=dropout > 0, **kwargs)
