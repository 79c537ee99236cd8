"""What planner and simulator ask of any cost model: seconds of compute and of communication."""

from typing import Protocol

from mmplan.cost_models.layer import Layer
from mmplan.cost_models.load import Load


class CostModel(Protocol):
    """Seconds, each from one source; a layer's are for one microbatch on each of its `tp` ranks, with the tensor
    parallel communication that compute waits for."""

    def forward_s(self, layer: Layer, load: Load, tp: int) -> float:
        """Seconds of the forward pass."""
        ...

    def dgrad_s(self, layer: Layer, load: Load, tp: int) -> float:
        """Seconds of the input gradients; 0.0 where no value carries one."""
        ...

    def wgrad_s(self, layer: Layer, load: Load, tp: int) -> float:
        """Seconds of the weight gradients; 0.0 where nothing is trained."""
        ...

    def backward_s(self, layer: Layer, load: Load, tp: int) -> float:
        """dgrad_s + wgrad_s."""
        ...

    def transfer_s(self, bytes_sent: float, same_node: bool) -> float:
        """Seconds of one point-to-point message."""
        ...

    def all_reduce_s(self, bytes_reduced: float, ranks: int, ranks_per_node: int) -> float:
        """Seconds of an all-reduce of that many bytes on each of `ranks`, `ranks_per_node` of them in one node."""
        ...

    def optimizer_s(self, trainable_parameters_on_rank: int) -> float:
        """Seconds of the optimizer update of one rank."""
        ...
