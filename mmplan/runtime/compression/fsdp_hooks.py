"""Gradients in few bytes under FSDP: what each of its generations lets a hook replace.

FSDP2 (`fully_shard`) has no `register_comm_hook`. It has `set_all_reduce_hook`, called with the shard that a
reduce-scatter inside the node has averaged: there `compress_across` averages across nodes (dense inside, sparse across,
X8). And it has `set_custom_reduce_scatter`: `compress_reduce_scatter` puts an all-to-all of messages in its place.
Native HSDP calls the first hook behind its own dense all-reduce, too late: shard over the node's mesh alone.
FSDP1 has `register_comm_hook`, for strategies that are not hybrid: `reduce_scatter_hook`.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from mmplan.cost_models.compressed_bytes import GradientFormat
from mmplan.runtime.compression.feedback import ErrorFeedback


def compress_across(model: nn.Module, feedback: ErrorFeedback) -> None:
    """Average the shards of every `fully_shard` module over the feedback's group, the ranks of one place in all nodes.

    The model is sharded over a mesh of the node's ranks. As without it, weights begin alike in all nodes.

    Raises:
        ValueError: no part of the model is sharded, or by native HSDP.
    """
    for name, module in _sharded(model):
        mesh = next(p for p in module.parameters()).device_mesh  # type: ignore[attr-defined]
        if mesh.ndim > 1:
            raise ValueError(
                f"'{name}' is sharded over a mesh of {mesh.ndim} axes: there torch itself sums dense over the first "
                "one before it calls the hook, and lets nothing take the place of that sum; call fully_shard with the "
                "mesh of the node's ranks alone"
            )
        stream = torch.cuda.Stream() if mesh.device_type == "cuda" else None  # type: ignore[no-untyped-call]
        module.set_all_reduce_hook(_averaging(feedback, name), stream=stream)


def _averaging(feedback: ErrorFeedback, name: str) -> Any:
    return lambda shard: feedback.average({name: shard})


def compress_reduce_scatter(model: nn.Module, feedback: ErrorFeedback) -> None:
    """Let every `fully_shard` module send messages where it would reduce-scatter its gradients.

    The state of a rank is as large as the whole gradients in fp32.

    Raises:
        ValueError: no part of the model is sharded.
    """
    for name, module in _sharded(model):
        module.set_custom_reduce_scatter(MessageReduceScatter(name, feedback))  # type: ignore[arg-type]


class MessageReduceScatter:
    """FSDP2's `ReduceScatter` interface (torch.distributed.fsdp._fully_shard._fsdp_api)."""

    def __init__(self, name: str, feedback: ErrorFeedback) -> None:
        self._name, self._feedback = name, feedback

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"'{self._name}' asks for {op}, and messages are summed or averaged")
        self._feedback.scatter_average(self._name, input_tensor, output_tensor)
        if op == dist.ReduceOp.SUM:
            output_tensor *= dist.get_world_size(group)


class ReduceScatterState:
    """State of `reduce_scatter_hook` for FSDP1. Units are told apart by their order in a backward, which is the same in
    every step where all of them get gradients; another length is refused.

    Raises:
        ValueError: a unit is sharded by a hybrid strategy.
    """

    def __init__(self, model: nn.Module, form: GradientFormat, group: dist.ProcessGroup | None = None) -> None:
        wrapped = FullyShardedDataParallel.fsdp_modules(model)
        hybrid = [unit.sharding_strategy.name for unit in wrapped if "HYBRID" in unit.sharding_strategy.name]
        if hybrid:
            raise ValueError(
                f"FSDP1's register_comm_hook takes no hook for {hybrid[0]}, whose sums inside and across nodes are its "
                "own: use fully_shard over the node's ranks with compress_across, or DDP with two_level_hook"
            )
        units = [set(unit.parameters()) for unit in wrapped]
        self._units = sum(bool(own.difference(*(other for other in units if other < own))) for own in units)
        self._next = 0
        self.feedback = ErrorFeedback(form, group)

    def reduce(self, whole: Tensor, own: Tensor) -> None:
        self.feedback.scatter_average(f"unit {self._next}", whole, own)
        self._next = (self._next + 1) % self._units

    def state_dict(self) -> dict[str, Any]:
        return self.feedback.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.feedback.load_state_dict(state)


def reduce_scatter_hook(state: ReduceScatterState, whole: Tensor, own: Tensor) -> None:
    """For `FullyShardedDataParallel.register_comm_hook(state, reduce_scatter_hook)`."""
    state.reduce(whole, own)


def _sharded(model: nn.Module) -> list[tuple[str, FSDPModule]]:
    found = [(name or "the model", module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if not found:
        raise ValueError("no part of the model is sharded; call fully_shard before")
    return found
