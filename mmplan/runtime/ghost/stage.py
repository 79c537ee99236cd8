"""A pipeline stage of a real model: receives, runs the model's own forward as far as its units go, sends."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from mmplan.planner.stage_graph import CutTensor
from mmplan.runtime.ghost.flow import Source
from mmplan.runtime.ghost.joined_images import ImageRanks, joins_of
from mmplan.runtime.ghost.model import GhostModel, Pass
from mmplan.runtime.ghost.recording import Batch, Recording
from mmplan.runtime.ghost.row_trials import RowWays
from mmplan.runtime.ghost.traffic import Owners, carried, payload
from mmplan.runtime.ghost.turns import Turns
from mmplan.runtime.held import Buffer, Place
from mmplan.runtime.norms import wide
from mmplan.runtime.numerics.modality_parts import SHARED
from mmplan.runtime.numerics.part_scales import PartScales
from mmplan.runtime.state import StageState
from mmplan.runtime.tensor_sums import TensorRanks
from mmplan.runtime.weight_store import WeightStore
from mmplan.runtime.weighted_stage import WeightedStage


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Example:
    """One microbatch: arguments of the model's forward, what is computed of them, and the share of its loss in the
    step's."""

    batch: Batch
    recording: Recording
    share: float


@dataclass(frozen=True, slots=True, eq=False)
class _Done:
    """A microbatch between its forward and its backward."""

    work: Pass
    leaves: Mapping[Source, Tensor]  # received, as they take their gradient
    kept: dict[int, int]


class StageSums(Protocol):
    """What a stage exchanges with the ranks that share its layers. `exchanging`: units whose forward does."""

    @property
    def exchanging(self) -> Set[str]: ...

    def forward_bytes(self, recording: Recording) -> int: ...

    def backward_bytes(self, recording: Recording) -> int: ...

    def returning(self, recording: Recording) -> Set[tuple[str, int]]:
        """Calls whose outputs have a gradient."""


@dataclass(frozen=True, slots=True, eq=False)
class JointSums:
    """What ranks exchange in two ways."""

    first: StageSums
    second: StageSums

    @property
    def exchanging(self) -> Set[str]:
        return {*self.first.exchanging, *self.second.exchanging}

    def forward_bytes(self, recording: Recording) -> int:
        return self.first.forward_bytes(recording) + self.second.forward_bytes(recording)

    def backward_bytes(self, recording: Recording) -> int:
        return self.first.backward_bytes(recording) + self.second.backward_bytes(recording)

    def returning(self, recording: Recording) -> Set[tuple[str, int]]:
        return self.first.returning(recording)


class GhostStage(WeightedStage):
    """One stage of one replica (see `Stage`).

    Args:
        layers: ids of the plan's layers on this stage.
        own: units that this stage computes.
        recomputed: those of them that are run once more for the backward.
        state: weights, gradients and optimizer of the stage's pieces.
        places: their parameters by the names of the model.
        buffers: of the whole model.
        turns: when which units have whole weights.
        parts: whose loss scale gradients carry.
        scales: of losses; None: they are not scaled.
        sums: what it exchanges with `ranks` that share its layers; without these nothing.
        rows: how its units run on the rows of a context-parallel rank; None: they run whole.
        images: ranks that take images of modules in turn; None: there are none.
    """

    def __init__(
        self,
        *,
        stage: int,
        layers: Sequence[str],
        own: frozenset[str],
        recomputed: frozenset[str],
        owners: Owners,
        model: GhostModel,
        state: StageState,
        places: Mapping[Parameter, Place],
        buffers: Sequence[Buffer],
        store: WeightStore,
        turns: Turns,
        sums: StageSums,
        rows: RowWays | None,
        images: ImageRanks | None,
        ranks: TensorRanks | None,
        count_kept: bool,
        parts: Mapping[Parameter, str],
        scales: PartScales | None = None,
    ) -> None:
        super().__init__(stage, state, store, places, parts, count_kept=count_kept, buffers=buffers)
        self._turns, self._scales, self._sums, self._ranks = turns, scales, sums, ranks
        self._images = images
        self._rows, self._cp = rows, 1 if rows is None else rows.ranks.peers.degree
        self._layers = frozenset(layers)
        self._own, self._recomputed, self._owners = own, recomputed, owners
        self._model = model
        self._incoming: tuple[CutTensor, ...] = ()
        self._outgoing: tuple[tuple[CutTensor, frozenset[str]], ...] = ()
        self._foreseen_bytes = 0
        self._examples: Sequence[Example] = ()
        self._in_flight: dict[int, _Done] = {}
        self._loss = 0.0

    def load(self, examples: Sequence[Example], cuts: Sequence[CutTensor], stages: Sequence[Sequence[str]]) -> None:
        """Take the data of the next step, and what passes between stages in it; its loss starts from nothing."""
        self._examples, self._loss = examples, 0.0
        self.outputs.clear()
        self._incoming = tuple(cut for cut in cuts if cut.target == self.stage)
        self._outgoing = tuple((cut, frozenset(stages[cut.target])) for cut in cuts if cut.source == self.stage)

    def forward(self, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        example = self._examples[microbatch]
        leaves = self._leaves(example.recording, received)
        sent = {cut.activation: self._sent(example.recording, cut, readers) for cut, readers in self._outgoing}
        computes_loss = self._owners.loss_layer in self._layers
        joins = joins_of(example.recording, self._own, computes_loss=computes_loss)
        work = Pass(
            recording=example.recording,
            own=self._own,
            recomputed=self._recomputed,
            # A copy, because models may write into what is theirs.
            received={source: leaf.clone() if leaf.requires_grad else leaf for source, leaf in leaves.items()},
            sent=frozenset(source for sources in sent.values() for source in sources),
            computes_loss=computes_loss,
            turns=self._turns,
            exchanging=self._sums.exchanging,
            rows=self._rows,
            images=self._images,
            joins=joins,
        )
        kept: dict[int, int] = {}
        tensors = [value for value in example.batch.values() if isinstance(value, Tensor)]
        given = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        with (
            self._summing(self._sums.forward_bytes(example.recording)),
            self._turns.forward(lambda: self.counting(kept, given)),
        ):
            self._model.run(work, example.batch, lambda unit, output: self.outputs.add(microbatch, unit, output))
        if work.loss is not None:
            work.loss = work.loss * (example.share / self._cp)  # context-parallel ranks compute it alike
            self._loss += float(work.loss.detach())
        self._in_flight[microbatch] = _Done(work, leaves, kept)
        return {name: _packed([work.outputs[source] for source in sources]) for name, sources in sent.items()}

    def backward(self, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        done = self._in_flight.pop(microbatch)
        recording, work = self._examples[microbatch].recording, done.work
        roots: list[Tensor] = [] if work.loss is None else [self._scaled(work.loss)]
        gradients: list[Tensor | None] = [None] * len(roots)
        for cut, readers in self._outgoing:
            if cut.gradient in received:
                sources = self._sent(recording, cut, readers)
                parts = _unpacked(received[cut.gradient], recording, sources, self._cp)
                wanted = [source for source in sources if work.outputs[source].requires_grad]
                roots += [work.outputs[source] for source in wanted]
                gradients += [parts[source] for source in wanted]
        with self._summing(self._sums.backward_bytes(recording)), self._turns.backward():
            if any(root.requires_grad for root in roots):
                torch.autograd.backward(roots, gradients)
        return {cut.gradient: self._returned(recording, cut, done.leaves) for cut in self._incoming if cut.carries_grad}

    def _scaled(self, loss: Tensor) -> Tensor:
        """Outside of all units the scale is that of what is shared."""
        return loss if self._scales is None else wide(loss) * self._scales.of[SHARED].scale

    def reads(self, *, gradients: bool) -> tuple[str, ...]:
        if gradients:
            return tuple(cut.gradient for cut, _ in self._outgoing if cut.carries_grad)
        return tuple(cut.activation for cut in self._incoming)

    def foreseen_bytes(self) -> int:
        return self._foreseen_bytes

    def poison(self) -> None:
        super().poison()
        self._loss *= math.nan

    def losses(self) -> dict[str, float]:
        return {self._owners.loss_layer.split(".")[0]: self._loss} if self._owners.loss_layer in self._layers else {}

    def kept_bytes(self) -> Iterable[int]:
        return (sum(done.kept.values()) for done in self._in_flight.values())

    @contextmanager
    def _summing(self, expected_bytes: int) -> Iterator[None]:
        """A pass in which ranks that share layers exchange so much."""
        before = 0 if self._ranks is None else self._ranks.total_bytes
        self._foreseen_bytes += expected_bytes
        yield
        summed_bytes = 0 if self._ranks is None else self._ranks.total_bytes - before
        if summed_bytes != expected_bytes:
            raise ValueError(
                f"{summed_bytes} bytes were exchanged by ranks that share layers, {expected_bytes} were foreseen"
            )

    def _sent(self, recording: Recording, cut: CutTensor, readers: frozenset[str]) -> tuple[Source, ...]:
        return payload(recording, self._owners, cut.edge.producer, readers)

    def _leaves(self, recording: Recording, received: Mapping[str, Tensor]) -> dict[Source, Tensor]:
        """Received tensors; those whose gradient goes back require one, where what they are made of is trained."""
        leaves: dict[Source, Tensor] = {}
        returning = self._sums.returning(recording) if self._incoming else set()
        for cut in self._incoming:
            sources = self._sent(recording, cut, self._layers)
            if sources:
                parts = _unpacked(received[cut.activation], recording, sources, self._cp)
                for source, part in parts.items():
                    returns = cut.carries_grad and (source.unit, source.call) in returning
                    leaves[source] = part.requires_grad_(returns and part.is_floating_point())
        return leaves

    def _returned(self, recording: Recording, cut: CutTensor, leaves: Mapping[Source, Tensor]) -> Tensor:
        sources = self._sent(recording, cut, self._layers)
        parts = [leaves[s].grad if leaves[s].grad is not None else torch.zeros_like(leaves[s]) for s in sources]
        return _packed([part for part in parts if part is not None])


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """One row of bytes; no copy where there is one part."""
    flat = [part.detach().contiguous().view(-1).view(torch.uint8) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


def _unpacked(flat: Tensor, recording: Recording, sources: Sequence[Source], cp: int) -> dict[Source, Tensor]:
    """The tensors in a row of bytes, in memory of their own."""
    parts: dict[Source, Tensor] = {}
    first = 0
    for source in sources:
        like = carried(recording, source, cp)
        end = first + like.numel() * like.element_size()
        parts[source] = flat[first:end].clone().view(like.dtype).view(like.shape)
        first = end
    return parts
