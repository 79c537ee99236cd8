"""Hooks for `DistributedDataParallel.register_comm_hook(state, hook)` that send gradients in few bytes.

    state = TopKState(model, TOP_K_SIGN)          # X7: 5 % of the elements in 1 + 4 bits
    ddp.register_comm_hook(state, top_k_hook)

State goes by parameter names, not by buckets: DDP makes new buckets after the first step, and again in a resumed run.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from mmplan.cost_models.compressed_bytes import TOP_K_FP8, TOP_K_SIGN, GradientFormat
from mmplan.runtime.compression.feedback import ErrorFeedback
from mmplan.runtime.compression.low_rank import LowRank
from mmplan.runtime.compression.two_levels import TwoLevels


class HookState:
    """Names of a model's parameters, and the stream that a GPU compresses and sends on beside the backward."""

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self._stream: torch.cuda.Stream | None = None

    def gradients(self, bucket: GradBucket) -> dict[str, Tensor]:
        """Views of the bucket, by name of the parameter.

        Raises:
            ValueError: the state was made for another model.
        """
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        strange = sum(parameter not in self._names for parameter, _ in pairs)
        if strange:
            raise ValueError(f"{strange} of {len(pairs)} parameters are not of the model that the state was made for")
        return {self._names[parameter]: gradient for parameter, gradient in pairs}

    def beside(self, buffer: Tensor, work: Callable[[], None]) -> Future[Tensor]:
        """Do the work, on a GPU behind the backward so far and beside the rest of it; the buffer is the result."""
        if not buffer.is_cuda:
            work()
            return finished(buffer)
        if self._stream is None:
            self._stream = torch.cuda.Stream(buffer.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(self._stream):
            work()
            buffer.record_stream(self._stream)
            return finished(buffer)


def finished(buffer: Tensor) -> Future[Tensor]:
    """A future with this result; who waits for it waits for the stream that was current here."""
    future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future


class TopKState(HookState):
    """The largest elements of each gradient, with error feedback: by default X7, 5 % of them in 1 + 4 bits."""

    def __init__(
        self, model: nn.Module, form: GradientFormat = TOP_K_SIGN, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(model)
        self.feedback = ErrorFeedback(form, group)

    def state_dict(self) -> dict[str, Any]:
        return self.feedback.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.feedback.load_state_dict(state)


def top_k_hook(state: TopKState, bucket: GradBucket) -> Future[Tensor]:
    """One all-gather of messages for each bucket."""
    return state.beside(bucket.buffer(), lambda: state.feedback.average(state.gradients(bucket)))


class TwoLevelState(HookState):
    """Dense inside a node, the largest elements across nodes: by default X8, 20 % of them in FP8.

    Args:
        inside, across: groups of this rank: those of its node, and those of its place in all nodes.
    """

    def __init__(
        self,
        model: nn.Module,
        inside: dist.ProcessGroup,
        across: dist.ProcessGroup,
        form: GradientFormat = TOP_K_FP8,
    ) -> None:
        super().__init__(model)
        self.levels = TwoLevels(inside, ErrorFeedback(form, across))

    def state_dict(self) -> dict[str, Any]:
        return self.levels.feedback.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.levels.feedback.load_state_dict(state)


def two_level_hook(state: TwoLevelState, bucket: GradBucket) -> Future[Tensor]:
    """A reduce-scatter inside the node, an all-gather of messages across, an all-gather inside, for each bucket."""
    return state.beside(bucket.buffer(), lambda: state.levels.average(state.gradients(bucket)))


class LowRankState(HookState):
    """Gradients of several modalities' corresponding matrices in one low-rank basis, see `LowRank`.

    Args:
        towers: by modality, how the names of its parameters begin, for example {"vision": "vision.", "text": "text."}.
    """

    def __init__(
        self,
        model: nn.Module,
        towers: Mapping[str, str],
        *,
        rank: int = 4,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(model)
        shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
        self.low_rank = LowRank(shapes, towers, rank=rank, seed=seed, group=group)
        self._waiting: list[tuple[Future[Tensor], Tensor]] = []
        self._collected: dict[str, Tensor] = {}

    def add(self, bucket: GradBucket) -> Future[Tensor]:
        if bucket.index() == 0:  # a backward that failed may have left something
            self._waiting, self._collected = [], {}
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        self._waiting.append((future, buffer))
        self._collected |= self.gradients(bucket)
        if bucket.is_last():
            self.low_rank.average(self._collected)
            for waiting, result in self._waiting:
                waiting.set_result(result)
            self._waiting, self._collected = [], {}
        return future

    def state_dict(self) -> dict[str, Any]:
        return self.low_rank.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.low_rank.load_state_dict(state)


def low_rank_hook(state: LowRankState, bucket: GradBucket) -> Future[Tensor]:
    """Three all-reduces behind the last bucket, because matrices that share a basis lie in several."""
    return state.add(bucket)
