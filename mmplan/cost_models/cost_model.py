"""What planner and simulator ask of any cost model: seconds of compute and of communication."""

from typing import Protocol

from mmplan.cost_models.layer import Layer
from mmplan.cost_models.layout import Layout, Trained
from mmplan.cost_models.load import Load


class CostModel(Protocol):
    """Seconds, each from one source; a layer's are for one microbatch on each rank of its `layout` (a plain number is
    its tp), with the communication that compute waits for and, in the backward, what is recomputed."""

    def forward_s(self, layer: Layer, load: Load, layout: int | Layout) -> float:
        """Seconds of the forward pass."""
        ...

    def dgrad_s(self, layer: Layer, load: Load, layout: int | Layout) -> float:
        """Seconds of the input gradients; 0.0 where no value carries one."""
        ...

    def wgrad_s(self, layer: Layer, load: Load, layout: int | Layout) -> float:
        """Seconds of the weight gradients; 0.0 where nothing is trained."""
        ...

    def backward_s(self, layer: Layer, load: Load, layout: int | Layout) -> float:
        """dgrad_s + wgrad_s."""
        ...

    def transfer_s(self, bytes_sent: float, same_node: bool) -> float:
        """Seconds of one point-to-point message."""
        ...

    def make_whole_s(self, bytes_made: float, layout: Layout) -> tuple[float, float]:
        """Seconds in which ranks make a tensor whole that they have in parts, to send it to another stage, and its
        gradient, which that stage has in parts."""
        ...

    def join_rows_s(self, bytes_joined: float, layout: Layout) -> float:
        """Seconds in which cp ranks gather a tensor of which each got a slice, or sum its gradient and scatter it."""
        ...

    def place_rows_s(self, bytes_placed: float, layout: Layout) -> float:
        """Seconds in which rows of a tensor, of which each cp rank has a slice, go to the one that needs them, or their
        gradient comes back."""
        ...

    def share_rows_s(self, bytes_shared: float, layout: Layout, *, gathered: bool) -> float:
        """Seconds in which the ranks of a tensor-parallel group get a tensor whole: of which each has a slice, which
        are gathered, or which the first of them has and broadcasts."""
        ...

    def reduce_s(self, trained: Trained, layout: Layout, ranks_per_node: int) -> float:
        """Seconds in which the ranks of a stage sum the gradients of a step, and gather weights that are sharded.

        Args:
            trained: parameters of one rank.
            ranks_per_node: of the dp * cp ranks that hold the same dense weights, those in one node.
        """
        ...

    def gather_s(self, trained: Trained, layout: Layout, ranks_per_node: int) -> float:
        """Of `reduce_s` the seconds behind the update, in which weights are gathered."""
        ...

    def sharding_s(self, held: Trained, trained: Trained, layout: Layout) -> tuple[float, float]:
        """Seconds per microbatch in which weights of `held` parameters are gathered for a forward (as long for a
        backward), and gradients of `trained` ones scattered, where sharding needs it; a part of these, `serial_share`,
        never runs beside computation."""
        ...

    @property
    def serial_share(self) -> float:
        """Of the shorter of communication and computation, what does not overlap."""
        ...

    def update_s(self, trained: Trained, layout: Layout) -> float:
        """Seconds of the optimizer update of one rank."""
        ...
