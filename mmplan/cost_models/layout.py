"""How the ranks of a stage share a layer: its weights, its rows, its state, and what of it is computed twice."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

from mmplan.cost_models.counts import edge_bytes, is_tied, op_copied_parameters, op_parameters
from mmplan.cost_models.graph import ComputationGraph, Edge
from mmplan.cost_models.layer import Layer, splits_rows
from mmplan.cost_models.load import Load, Loads
from mmplan.cost_models.memory_activations import BLOCKS
from mmplan.cost_models.memory_states import Replicas, is_expert
from mmplan.cost_models.ops import op_trainable
from mmplan.cost_models.shard import Shard, shard_of
from mmplan.cost_models.values import rows_of_context_rank, rows_of_sequence_rank
from mmplan.scenario.scenario import DTYPE_BYTES, Scenario
from mmplan.scenario.technique import ContextParallel, Recompute, Sharding

RecomputeLevel = Literal[
    "none", "selective", "1 of 8", "quarter", "3 of 8", "half", "5 of 8", "three quarters", "7 of 8", "full"
]
RECOMPUTE_LEVELS: tuple[RecomputeLevel, ...] = get_args(RecomputeLevel)
# Which of several levels that recompute the same blocks of a stage says so.
PLAINEST: tuple[RecomputeLevel, ...] = (
    *("none", "selective", "full", "half", "quarter", "three quarters"),
    *("1 of 8", "3 of 8", "5 of 8", "7 of 8"),
)
# Of every eight blocks of a module so many drop their activations as a whole, in this order: each level adds one of any
# eight blocks in a row, so stages of up to eight blocks may recompute any number of them.
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
BLOCKS_PER_PATTERN = len(_ORDER)
_TURN = {index: turn for turn, index in enumerate(_ORDER)}
_BLOCKS_OF_EIGHT = {level: count for count, level in enumerate(RECOMPUTE_LEVELS[2:], start=1)}


@dataclass(frozen=True, kw_only=True, order=True)
class Layout:
    """Degrees of a stage's ranks. Functions that take one also take a plain `tp`, short for `Layout(tp=tp)`.

    Attributes:
        tp, cp, dp: tensor, context and data parallel degrees; a stage has tp * cp * dp ranks.
        ep, etp: ranks that the experts are spread over, and ranks that share one expert (as tp while ep is 1).
        sharding: ZeRO stage over the dp * cp ranks that hold the same weights.
        spread: modules that are not split: each of the tp * cp ranks runs whole layers on its part of the images or
            clips of a microbatch, and the outputs are gathered (Megatron-LM's encoders run so with
            `--encoder-tensor-model-parallel-size 1`; InternVL3.5, arXiv 2508.18265, section 2.4).
        patches: those of them whose blocks cut the rows of all images over the ranks instead (patch groups), whose
            keys and values pass around or are gathered; their first layer runs whole on each rank. Projectors behind
            them too: where these join or average rows, what the ranks' own rows give is summed and dealt out.
        together: modules in front of language models that run once for `batch_factor` microbatches in a row.
        recompute: what the blocks of this stage drop in their forward.
        pools: of the cluster, those that hold ranks of this stage.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    sharding: Sharding = "none"
    spread: tuple[str, ...] = ()
    patches: tuple[str, ...] = ()
    together: tuple[str, ...] = ()
    batch_factor: int = 1
    recompute: RecomputeLevel = "none"
    pools: tuple[int, ...] = (0,)

    @cached_property
    def replicas(self) -> int:
        """Ranks that hold the same weights outside experts and spread modules."""
        return self.dp * self.cp

    @cached_property
    def expert_side(self) -> int:
        """Ranks over which one whole set of experts lies."""
        return self.ep * self.etp if self.ep > 1 else self.tp

    @cached_property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts."""
        return max(1, self.tp * self.replicas // self.expert_side)

    @cached_property
    def most_replicas(self) -> int:
        """Ranks that hold the same weights of what most ranks hold: spread modules lie on those of tp too."""
        return max(self.replicas * (self.tp if self.spread else 1), self.expert_replicas if self.ep > 1 else 1)

    def microbatches_of(self, module: str) -> int:
        """How many microbatches a module runs at once."""
        return self.batch_factor if module in self.together else 1

    def at_once(self, loads_of: Callable[[int], Loads], samples: int) -> Loads:
        """Loads of what each module runs at once, of those of so many samples; `samples` make one microbatch."""
        if self.batch_factor == 1:
            return loads_of(samples)
        one, several = loads_of(samples), loads_of(samples * self.batch_factor)
        return {module: several[module] if module in self.together else load for module, load in one.items()}

    def sends_together(self, edge: Edge) -> bool:
        """Whether a tensor goes from stage to stage once for all microbatches that both its ends run at once."""
        ends = (edge.producer, edge.consumer)
        return self.batch_factor > 1 and all(layer.rpartition(".")[0] in self.together for layer in ends)

    def has_patches(self, layer: Layer) -> bool:
        """Whether a rank has some rows of the layer's images."""
        return layer.kind in ("block", "projector") and layer.module in self.patches

    def handover(self, layer: Layer) -> tuple[bool, bool, bool]:
        """What ranks make whole of a layer's output for other modules: (the parts that they have of it, are gathered;
        the gradient of these is summed over cp; gradients that readers have by images are gathered)."""
        if not self.spread:
            return False, False, False
        has_rows = self.has_patches(layer)
        others = [reader for reader in layer.readers if not (has_rows and reader in self.patches)]
        by_images, readers = self._by_images(layer.module), {self._by_images(reader) for reader in others}
        if by_images:
            return False in readers, False in readers, False
        return has_rows and bool(readers), has_rows and False in readers, True in readers

    def places(self, layer: Layer) -> bool:
        """Whether of rows that ranks have of a layer's output each goes to the one that has its place in the reader's
        sequence, or that hands it to another mesh, and to no other. Where tp is 1 that is never slower than to make
        them whole on all: there is as much to send to each rank as that has to send, and gradients are not summed."""
        alone = self.cp > 1 and self.tp == 1 and self.microbatches_of(layer.module) == 1
        return alone and layer.placed and self.has_patches(layer)

    def _by_images(self, module: str) -> bool:
        return module in self.spread and module not in self.patches

    def sharing(self, layer: Layer) -> tuple[int, ...]:
        """What of the degrees matters to a layer beside its `shard`: where it or its readers have parts."""
        if not self.spread:
            return ()
        moved = self.handover(layer)
        if layer.module in self.spread:
            return self.tp, self.cp, layer.module in self.patches, *moved, self.places(layer)
        return (self.tp, self.cp, *moved) if any(moved) else ()

    def at(self, recompute: RecomputeLevel) -> "Layout":
        """The same ranks at another level of recomputation."""
        return self if recompute == self.recompute else replace(self, recompute=recompute)

    def shard(self, layer: Layer) -> Shard:
        """Degrees inside a layer: only language models split rows over cp, only layers with experts over ep."""
        if layer.module in self.spread:
            return shard_of(cp=self.tp * self.cp) if self.has_patches(layer) else shard_of()
        cp = self.cp if splits_rows(layer) else 1
        if self.ep > 1 and layer.has_experts:
            return shard_of(tp=self.tp, ep=self.ep, etp=self.etp, cp=cp)
        return shard_of(tp=self.tp, cp=cp)

    def load(self, layer: Layer, load: Load) -> Load:
        """A rank's part of a microbatch: whole images or clips where the module is spread, the most that any has."""
        count, ranks = load.sequences, self.tp * self.cp
        if layer.module not in self.spread or layer.module in self.patches or count <= 1 or ranks == 1:
            return load
        return load.scaled(math.ceil(count / ranks - 1e-9) / count)

    def state_replicas(self, layer: Layer) -> Replicas:
        """Over how many ranks the state of a layer's parameters can be split."""
        dense = self.replicas * (self.tp if layer.module in self.spread else 1)
        return Replicas(dense=dense, expert=self.expert_replicas)

    def recomputed(self, layer: Layer) -> Recompute:
        """What this layer drops in its forward."""
        if layer.kind not in BLOCKS or self.recompute == "none":
            return "none"
        if self.recompute == "selective":
            return "selective"
        return "full" if _TURN[layer.index % BLOCKS_PER_PATTERN] < _BLOCKS_OF_EIGHT[self.recompute] else "none"

    def sent_bytes(self, edge: Edge, graph: ComputationGraph, loads: Loads, scenario: Scenario) -> int:
        """Bytes that a rank sends of one microbatch's tensor: its rows between layers that split them alike, and its
        part of these with sequence parallelism; else all rows, which every rank has or makes whole."""
        sequence = self.tp > 1 and scenario.technique.sequence_parallel
        if self.cp == 1 and not self.patches and not sequence:
            return edge_bytes(edge, loads, scenario.precision_of(edge))
        producer, reader = graph.layer(edge.producer), graph.layer(edge.consumer)
        cp = min(self.shard(producer).cp, self.shard(reader).cp)
        cp = cp if self.has_patches(producer) == self.has_patches(reader) else 1
        tp = self.tp if sequence and splits_rows(producer) and producer.kind not in ("head", "loss") else 1
        if cp == tp == 1:
            return edge_bytes(edge, loads, scenario.precision_of(edge))
        rows: float = getattr(loads[edge.load_module], edge.load_field)
        return (
            edge.width
            * rows_of_sequence_rank(rows_of_context_rank(rows, cp), tp)
            * DTYPE_BYTES[scenario.precision_of(edge)]
        )

    def makes_whole(self, edge: Edge, graph: ComputationGraph) -> bool:
        """Whether ranks that have images of a tensor make it whole only to send it to another stage, where each takes
        its images again."""
        if not self.spread:
            return False
        producer, reader = graph.layer(edge.producer), graph.layer(edge.consumer)
        dealt = self._by_images(producer.module) and self._by_images(reader.module)
        return dealt and self.tp * self.cp > 1 and not self.handover(producer)[0]


def attention_way(layer: Layer, way: ContextParallel) -> ContextParallel:
    """How keys and values of a layer's rows come together: heads of encoders are never dealt out."""
    return "ring" if way == "all-to-all" and not splits_rows(layer) else way


def base_of(level: RecomputeLevel) -> Recompute:
    """The technique of a level: parts of `full` are full."""
    if level == "none" or level == "selective":
        return level
    return "full"


def as_layout(degrees: "int | Layout") -> Layout:
    """A plain tensor-parallel degree as a layout."""
    return degrees if isinstance(degrees, Layout) else Layout(tp=degrees)


def together_text(together: Sequence[str], batch_factor: int) -> str:
    """`, vision and projector on 4 microbatches at once`; empty where all run each microbatch alone."""
    return f", {' and '.join(together)} on {batch_factor} microbatches at once" if together else ""


def spread_text(spread: Sequence[str], patches: Sequence[str]) -> str:
    """`, audio spread, vision cut along patches`; empty where no module is."""
    by_images = [name for name in spread if name not in patches]
    parts = [f", {' and '.join(by_images)} spread"] if by_images else []
    parts += [f", {' and '.join(patches)} cut along patches"] if patches else []
    return "".join(parts)


@dataclass(frozen=True, slots=True)
class Trained:
    """Trained parameters of one rank, by the ranks that hold the same: `dense` lie on dp * cp ranks, `spread` ones on
    tp times as many, `experts` on `Layout.expert_replicas`. Of `dense` ones `kept` are not compressed (in zones, or
    alike on all tp ranks), and the others are those of `messages` layers. `wide`: how many of dense, spread and experts
    have fp32 weights where modules differ in precision; None: not known, then costs are the least that they can be."""

    dense: int = 0
    spread: int = 0
    experts: int = 0
    kept: int = 0
    messages: int = 0
    wide: tuple[int, int, int] | None = None

    def __add__(self, other: "Trained") -> "Trained":
        return Trained(
            self.dense + other.dense,
            self.spread + other.spread,
            self.experts + other.experts,
            self.kept + other.kept,
            self.messages + other.messages,
            _both_wide(self, other),
        )

    def times(self, count: int) -> "Trained":
        """Of so many equal layers."""
        return Trained(
            self.dense * count,
            self.spread * count,
            self.experts * count,
            self.kept * count,
            self.messages * count,
            None if self.wide is None else (self.wide[0] * count, self.wide[1] * count, self.wide[2] * count),
        )

    def in_precision_of(self, layer: Layer) -> "Trained":
        """With what is known of their weights as they are the layer's."""
        fp32 = layer.precision == "fp32"
        return replace(self, wide=(self.dense, self.spread, self.experts) if fp32 else (0, 0, 0))

    @property
    def total(self) -> int:
        return self.dense + self.spread + self.experts


def _both_wide(a: Trained, b: Trained) -> tuple[int, int, int] | None:
    """`Trained.wide` of a sum."""
    if a.total == 0 or b.total == 0:
        return a.wide if b.total == 0 else b.wide
    if a.wide is None or b.wide is None:
        return None
    return a.wide[0] + b.wide[0], a.wide[1] + b.wide[1], a.wide[2] + b.wide[2]


def trained_on_rank(layer: Layer, layout: Layout, *, tied: bool = False) -> Trained:
    """Trained parameters of a layer on one rank; a tied head has none, its matrix is the token table's. With `tied`
    those of that matrix alone, as a stage has them that the table is not on."""
    shard = layout.shard(layer)
    trained = [op for op in layer.ops if op_trainable(op) and is_tied(op) == tied]
    experts = sum(op_parameters(op, shard) for op in trained if is_expert(op))
    rest = sum(op_parameters(op, shard) for op in trained if not is_expert(op))
    if layer.module in layout.spread:
        return Trained(0, rest, experts).in_precision_of(layer)
    if layer.whole_gradient:
        return Trained(rest, 0, experts, kept=rest).in_precision_of(layer)
    copied = 0
    if shard.tp > 1:  # copies would drift apart if each rank chose its own elements of them
        copied = sum(op_copied_parameters(op, shard) for op in trained if not is_expert(op))
    return Trained(rest, 0, experts, kept=copied, messages=int(rest > copied)).in_precision_of(layer)
