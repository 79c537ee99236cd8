"""A pipeline stage of a real model: receives, runs the model's own forward as far as its units go, sends."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from mmplan.runtime.ghost.flow import Source
from mmplan.runtime.ghost.handovers import Handover, Parts
from mmplan.runtime.ghost.joined_images import ImageRanks, joins_of
from mmplan.runtime.ghost.model import GhostModel, Pass
from mmplan.runtime.ghost.recording import Batch, Recording
from mmplan.runtime.ghost.rows_of_units import RowsOfUnits
from mmplan.runtime.ghost.traffic import Owners
from mmplan.runtime.ghost.turns import Turns
from mmplan.runtime.ghost.vocabulary import Vocabulary
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
    """One part of a microbatch: arguments of the model's forward, what is computed of them, and the share of its loss
    in the step's."""

    batch: Batch
    recording: Recording
    share: float


@dataclass(frozen=True, slots=True, eq=False)
class _Done:
    """A part between its forward and its backward."""

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
        rows: how its units run on a rank's rows; None: they run whole.
        images: ranks that take images of modules in turn; None: there are none.
        vocabulary: units of which the rank has some ids; None: there are none.
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
        rows: RowsOfUnits | None,
        images: ImageRanks | None,
        vocabulary: Vocabulary | None,
        ranks: TensorRanks | None,
        count_kept: bool,
        parts: Mapping[Parameter, str],
        scales: PartScales | None = None,
    ) -> None:
        super().__init__(stage, state, store, places, parts, count_kept=count_kept, buffers=buffers)
        self._turns, self._scales, self._sums, self._ranks = turns, scales, sums, ranks
        self._images, self._vocabulary = images, vocabulary
        self._rows = rows
        self._layers = frozenset(layers)
        self._own, self._recomputed, self._owners = own, recomputed, owners
        self._model = model
        self._incoming: tuple[Handover, ...] = ()
        self._outgoing: tuple[Handover, ...] = ()
        self._foreseen_bytes = 0
        self._examples: Sequence[Sequence[Example]] = ()
        self._in_flight: dict[int, list[_Done]] = {}
        self._loss = 0.0

    def load(self, examples: Sequence[Sequence[Example]], handovers: Sequence[Handover]) -> None:
        """Take the data of the next step, by microbatch and part, and what passes to and from this stage in it; its
        loss starts from nothing."""
        self._examples, self._loss = examples, 0.0
        self.outputs.clear()
        self._incoming = tuple(one for one in handovers if one.cut.target == self.stage)
        self._outgoing = tuple(one for one in handovers if one.cut.source == self.stage)

    def forward(self, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        examples = self._examples[microbatch]
        recordings = [example.recording for example in examples]
        expected = sum(map(self._sums.forward_bytes, recordings))
        expected += sum(one.shared_bytes(recordings, gets=True, backward=False) for one in self._incoming)
        with self._summing(expected):
            leaves = self._leaves(recordings, received)
            done = [self._run(microbatch, *part) for part in zip(examples, leaves, strict=True)]
        self._in_flight[microbatch] = done
        return {
            one.cut.activation: one.handed(
                recordings, [[part.work.outputs[s] for s in one.sources(part.work.recording)] for part in done]
            )
            for one in self._outgoing
        }

    def _run(self, microbatch: int, example: Example, leaves: Mapping[Source, Tensor]) -> _Done:
        """The forward of one part."""
        computes_loss = self._owners.loss_layer in self._layers
        joins = joins_of(example.recording, self._own, computes_loss=computes_loss)
        work = Pass(
            recording=example.recording,
            own=self._own,
            recomputed=self._recomputed,
            # A copy, because models may write into what is theirs.
            received={source: leaf.clone() if leaf.requires_grad else leaf for source, leaf in leaves.items()},
            sent=frozenset(source for one in self._outgoing for source in one.sources(example.recording)),
            computes_loss=computes_loss,
            turns=self._turns,
            exchanging=self._sums.exchanging,
            rows=self._rows,
            images=self._images,
            vocabulary=self._vocabulary,
            joins=joins,
        )
        kept: dict[int, int] = {}
        tensors = [value for value in example.batch.values() if isinstance(value, Tensor)]
        given = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        with self._turns.forward(lambda: self.counting(kept, given)):
            self._model.run(work, example.batch, lambda unit, output: self.outputs.add(microbatch, unit, output))
        if work.loss is not None:
            alike = 1 if self._rows is None else self._rows.loss_parts
            work.loss = work.loss * (example.share / alike)
            self._loss += float(work.loss.detach())
        return _Done(work, leaves, kept)

    def backward(self, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        done = self._in_flight.pop(microbatch)
        recordings = [part.work.recording for part in done]
        expected = sum(map(self._sums.backward_bytes, recordings))
        expected += sum(one.shared_bytes(recordings, gets=False, backward=True) for one in self._outgoing)
        expected += sum(one.shared_bytes(recordings, gets=True, backward=True) for one in self._incoming)
        with self._summing(expected):
            returning = [one for one in self._outgoing if one.cut.carries_grad]
            came = [one.came_back(recordings, received.get(one.cut.gradient), self._ranks) for one in returning]
            for index, part in enumerate(done):
                self._run_back(part.work, [of_parts[index] for of_parts in came])
            return {
                one.cut.gradient: one.returned(recordings, self._gradients(one, done), self._ranks)
                for one in self._incoming
                if one.cut.carries_grad
            }

    def _run_back(self, work: Pass, came: Sequence[Mapping[Source, Tensor]]) -> None:
        """The backward of one part. Args: came: gradients of its outputs, by who has read them."""
        roots: list[Tensor] = [] if work.loss is None else [self._scaled(work.loss)]
        gradients: list[Tensor | None] = [None] * len(roots)
        for parts in came:
            wanted = [source for source in parts if work.outputs[source].requires_grad]
            roots += [work.outputs[source] for source in wanted]
            gradients += [parts[source] for source in wanted]
        with self._turns.backward():
            if any(root.requires_grad for root in roots):
                torch.autograd.backward(roots, gradients)

    def _scaled(self, loss: Tensor) -> Tensor:
        """Outside of all units the scale is that of what is shared."""
        return loss if self._scales is None else wide(loss) * self._scales.of[SHARED].scale

    def reads(self, *, gradients: bool) -> tuple[str, ...]:
        if gradients:
            return tuple(one.cut.gradient for one in self._outgoing if one.cut.carries_grad)
        return tuple(one.cut.activation for one in self._incoming)

    def foreseen_bytes(self) -> int:
        return self._foreseen_bytes

    def poison(self) -> None:
        super().poison()
        self._loss *= math.nan

    def losses(self) -> dict[str, float]:
        return {self._owners.loss_layer.split(".")[0]: self._loss} if self._owners.loss_layer in self._layers else {}

    def kept_bytes(self) -> Iterable[int]:
        return (sum(sum(part.kept.values()) for part in done) for done in self._in_flight.values())

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

    def _leaves(self, recordings: Parts, received: Mapping[str, Tensor]) -> list[dict[Source, Tensor]]:
        """Received tensors of each part; those whose gradient goes back require one, where what they are made of is
        trained."""
        leaves: list[dict[Source, Tensor]] = [{} for _ in recordings]
        returning = [self._sums.returning(recording) if self._incoming else set() for recording in recordings]
        for one in self._incoming:
            got = one.got(recordings, received.get(one.cut.activation), self._ranks)
            for index, parts in enumerate(got):
                for source, part in parts.items():
                    returns = one.cut.carries_grad and (source.unit, source.call) in returning[index]
                    leaves[index][source] = part.requires_grad_(returns and part.is_floating_point())
        return leaves

    @staticmethod
    def _gradients(one: Handover, done: Sequence[_Done]) -> list[list[Tensor]]:
        """Of what was received of each part; zeros where none came."""
        leaves = [[part.leaves[source] for source in one.sources(part.work.recording)] for part in done]
        return [[torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in part] for part in leaves]
