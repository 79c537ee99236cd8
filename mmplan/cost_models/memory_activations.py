"""What a layer keeps from its forward to its backward, by technique, and what it needs beside that at work.

With the technique of mmplan's own runtime this is `counts.kept_bytes`, which is exact against torch. Other techniques
change single rules: sequence parallel splits unsharded rows (arXiv 2205.05198, section 4.2.2), attention without a
fused kernel keeps the score matrix (section 4.1: 5 a s^2 b bytes with dropout), recompute keeps layer inputs.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from mmplan.cost_models.context_memory import others_rows_bytes
from mmplan.cost_models.counts import FP32_BYTES, KEEPS_FP32, op_parameters, saved_fp32_elements, saved_values
from mmplan.cost_models.expert_ops import Combine, GroupedLinear
from mmplan.cost_models.layer import Layer, values_with_grad
from mmplan.cost_models.load import Load
from mmplan.cost_models.local_layer import tokens_are_dealt
from mmplan.cost_models.memory_rules import memory_rules
from mmplan.cost_models.ops import Activation, Add, Attention, Embedding, Linear, Multiply, Op, op_inputs, op_trainable
from mmplan.cost_models.shard import Shard
from mmplan.cost_models.values import CONTEXT, Value, row_fraction, rows_of_sequence_rank
from mmplan.scenario.scenario import DTYPE_BYTES, Dtype
from mmplan.scenario.technique import Technique

BLOCKS = ("block", "cross_block")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Bytes of one layer and microbatch on one rank, by what they are."""

    values: float = 0.0
    scores: float = 0.0
    masks: float = 0.0

    @property
    def total(self) -> float:
        return self.values + self.scores + self.masks

    def __add__(self, other: "Kept") -> "Kept":
        return Kept(
            values=self.values + other.values, scores=self.scores + other.scores, masks=self.masks + other.masks
        )

    def scaled(self, factor: float) -> "Kept":
        return Kept(values=self.values * factor, scores=self.scores * factor, masks=self.masks * factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How layers are run: type, technique, degrees inside a layer."""

    precision: Dtype
    technique: Technique
    shard: Shard

    def splits_rows(self, layer: Layer) -> bool:
        """Whether sequence parallel splits the rows of this layer's unsharded values; encoders keep theirs whole, as
        their sequences need not divide by tp."""
        return self.technique.sequence_parallel and self.shard.tp > 1 and layer.modality in ("text", "speech")

    def elements(self, layer: Layer, value: Value, load: Load) -> float:
        """Elements of a value on one rank; what language models read across has all its rows."""
        if value.sharded or value.routed or value.rows == CONTEXT or not self.splits_rows(layer):
            return value.elements(load, self.shard)
        return rows_of_sequence_rank(value.local_rows(load, self.shard), self.shard.tp) * value.width

    def others_rows_bytes(self, op: Attention, load: Load, *, backward: bool) -> float:
        way, width = self.technique.context_parallel, DTYPE_BYTES[self.precision]
        return others_rows_bytes(op, load, self.shard, way, width, backward=backward)


def with_hooks(layer: Layer) -> Layer:
    """The layer as autograd sees it when its input carries a gradient although nothing needs it: a hook on the
    embedding's output (`enable_input_require_grads` of transformers) does this to every frozen module."""
    inputs = tuple(source.value for source in layer.sources)
    grads = values_with_grad(layer.ops, inputs)
    if layer.sources or layer.has_backward:
        return replace(layer, grad_values=grads)
    return replace(layer, grad_values=(layer.output.name,))  # the hook acts on the output of the first layer


def kept(layer: Layer, load: Load, setting: Setting) -> Kept:
    """Bytes kept without recompute of whole layers."""
    technique, width = setting.technique, DTYPE_BYTES[setting.precision]
    wide, narrow, others = _keeping(layer, technique)
    scores = masks = fp32 = 0.0
    for op in others:
        math_attention = isinstance(op, Attention) and technique.attention == "math"
        if isinstance(op, Attention) and op.y.name in layer.grad_values:
            if math_attention and technique.recompute != "selective":
                pairs = _score_elements(op, load, setting.shard)
                scores += pairs * width * (2 if technique.dropout else 1)
                masks += pairs if technique.dropout else 0
            elif technique.recompute != "selective":
                fp32 += saved_fp32_elements(layer, op, load, setting.shard)
        else:
            rows, elements = op.y.local_rows(load, setting.shard), saved_fp32_elements(layer, op, load, setting.shard)
            if rows and setting.splits_rows(layer) and not op_inputs(op)[0].sharded:
                elements *= rows_of_sequence_rank(rows, setting.shard.tp) / rows
            fp32 += elements
    if technique.dropout:
        masks += sum(setting.elements(layer, value, load) for value in _dropped(layer))
    values = width * sum(setting.elements(layer, value, load) for value in wide)
    values += sum(setting.elements(layer, value, load) for value in narrow)
    if setting.splits_rows(layer) and not tokens_are_dealt(setting.shard):
        read = {op.weights.name: op.weights for op in layer.ops if isinstance(op, Combine) and op.weights in wide}
        whole = (value.elements(load, setting.shard) - setting.elements(layer, value, load) for value in read.values())
        values += width * sum(whole)  # experts that are split over tp read the weights of all tokens
    if setting.shard.cp > 1 and technique.context_parallel == "all-to-all":
        values += width * sum(setting.elements(layer, value, load) for value in _kept_twice(layer, technique))
    return Kept(values=values + fp32 * FP32_BYTES, scores=scores, masks=masks)


@lru_cache(maxsize=4096)
def _keeping(layer: Layer, technique: Technique) -> tuple[tuple[Value, ...], tuple[Value, ...], tuple[Op, ...]]:
    """Values kept as they are, in one byte (inputs of FP8 products), and operators that keep something else."""
    wide: dict[str, Value] = {}
    narrow: dict[str, Value] = {}
    for op in layer.ops:
        for value in _saved(layer, op, technique):
            (narrow if _in_fp8(layer, op, technique) else wide)[value.name] = value
    others = tuple(op for op in layer.ops if isinstance(op, KEEPS_FP32) and op.y.name in layer.grad_values)
    return tuple(wide.values()), tuple(narrow.values()), others


@lru_cache(maxsize=4096)
def _kept_twice(layer: Layer, technique: Technique) -> tuple[Value, ...]:
    """Results of attention around which cp ranks exchange rows for heads: attention keeps all rows of some heads, the
    product that reads them its own rows (arXiv 2309.14509, figure 2)."""
    if layer.modality not in ("text", "speech"):
        return ()
    attentions = [op for op in layer.ops if isinstance(op, Attention) and not op.cross]
    others = [op for op in layer.ops if not isinstance(op, Attention) and not _in_fp8(layer, op, technique)]
    read = {value.name for op in others for value in _saved(layer, op, technique)}
    return tuple(op.y for op in attentions if op.y.name in read and op.y in _saved(layer, op, technique))


def kept_recomputed(layer: Layer, load: Load, setting: Setting) -> Kept:
    """Bytes kept when the whole layer is recomputed: its inputs (arXiv 1604.06174, section 4.1)."""
    if not layer.has_backward:
        return Kept()
    width = DTYPE_BYTES[setting.precision]
    names = {source.value for source in layer.sources}
    inputs = {value.name: value for op in layer.ops for value in op_inputs(op) if value.name in names}
    return Kept(values=sum(setting.elements(layer, value, load) * width for value in inputs.values()))


@lru_cache(maxsize=1024)  # of the same few layers every plan in the making, and every level of recomputation, asks
def working_bytes(layer: Layer, load: Load, setting: Setting) -> float:
    """Bytes that a layer's forward or backward needs at its worst operator beyond what it keeps.

    Forward: values not kept die after their last reader. Backward: kept values die after their operator, gradients
    live until they are consumed; a residual's gradient is one tensor. Without a fused kernel attention holds two more
    score matrices; without fused accumulation a weight gradient stands beside its buffer.
    """
    return max(0.0, _forward_excess(layer, load, setting), _backward_excess(layer, load, setting))


def _forward_excess(layer: Layer, load: Load, setting: Setting) -> float:
    width = DTYPE_BYTES[setting.precision]
    total = kept(layer, load, setting).total
    last_read = {value.name: index for index, op in enumerate(layer.ops) for value in op_inputs(op)}
    kept_names = {value.name for op in layer.ops for value in _saved(layer, op, setting.technique)}
    sizes: dict[str, float] = {}
    live, held, worst = 0.0, 0.0, 0.0
    for index, op in enumerate(layer.ops):
        for value in (*op_inputs(op), op.y):
            if value.name not in sizes:
                sizes[value.name] = setting.elements(layer, value, load) * width
                live += sizes[value.name]
        scratch = 0.0
        if isinstance(op, Attention) and setting.technique.attention == "math":
            scores = _score_elements(op, load, setting.shard) * width
            scratch, held = 2 * scores, held + kept(layer, load, setting).scores
        if isinstance(op, Attention):
            scratch += setting.others_rows_bytes(op, load, backward=False)
        worst = max(worst, live + held + scratch - total)
        for value in op_inputs(op):
            if last_read[value.name] == index and value.name not in kept_names:
                live -= sizes[value.name]
    return worst


def _backward_excess(layer: Layer, load: Load, setting: Setting) -> float:
    width, rules = DTYPE_BYTES[setting.precision], memory_rules(setting.technique.stack)
    first_keeper: dict[str, int] = {}
    for index, op in enumerate(layer.ops):
        for value in _saved(layer, op, setting.technique):
            first_keeper.setdefault(value.name, index)
    grads: dict[str, float] = {layer.output.name: setting.elements(layer, layer.output, load) * width}
    freed, worst = 0.0, 0.0
    for index in range(len(layer.ops) - 1, -1, -1):
        op = layer.ops[index]
        if op.y.name not in layer.grad_values:
            continue
        scratch = 0.0
        if isinstance(op, Attention) and setting.technique.attention == "math":
            scratch = 2 * _score_elements(op, load, setting.shard) * width
        if isinstance(op, Attention):
            scratch += setting.others_rows_bytes(op, load, backward=True)
        if op_trainable(op) and not rules.fused_wgrad and isinstance(op, Linear | GroupedLinear):
            scratch += op_parameters(op, setting.shard) * width
        if not isinstance(op, Add):
            for value in op_inputs(op):
                if value.name in layer.grad_values:
                    grads.setdefault(value.name, setting.elements(layer, value, load) * width)
        worst = max(worst, sum(grads.values()) + scratch - freed)
        gradient = grads.pop(op.y.name, 0.0)
        if isinstance(op, Add):  # both inputs share the gradient of the sum
            grads.setdefault(op.a.name, gradient)
        for value in _saved(layer, op, setting.technique):
            if first_keeper.get(value.name) == index:
                freed += setting.elements(layer, value, load) * width
    return worst


def _saved(layer: Layer, op: Op, technique: Technique) -> tuple[Value, ...]:
    values = saved_values(layer, op)
    if isinstance(op, Attention) and (technique.attention == "math" or technique.recompute == "selective"):
        return tuple(value for value in values if value is not op.y)
    if isinstance(op, Multiply) and memory_rules(technique.stack).fused_activation:
        active = {other.y.name for other in layer.ops if isinstance(other, Activation)}
        return tuple(value for value in values if value.name not in active)
    return values


def _in_fp8(layer: Layer, op: Op, technique: Technique) -> bool:
    """Inputs of FP8 products are kept in FP8 (TransformerEngine `save_original_input=False`)."""
    products = layer.kind in BLOCKS and not layer.no_fp8 and isinstance(op, Linear | GroupedLinear)
    return technique.fp8 != "none" and products


def _score_elements(op: Attention, load: Load, shard: Shard) -> float:
    """Query-key pairs times heads on one rank; masked halves are stored too."""
    heads = op.q.local_width(shard) // op.head_dim
    return op.pairs.of(load) * row_fraction(False, shard) * heads


def _dropped(layer: Layer) -> tuple[Value, ...]:
    """Values that dropout masks: what a block adds to the residual, and embeddings (arXiv 2205.05198, section 4.1)."""
    if layer.kind in BLOCKS:
        return tuple(op.b for op in layer.ops if isinstance(op, Add) and op.b.name in layer.grad_values)
    return tuple(op.y for op in layer.ops if isinstance(op, Embedding) and op.trainable)


def logits_bytes(layer: Layer, load: Load, setting: Setting, hidden: int) -> tuple[float, float]:
    """(kept from forward to backward, needed at work beside that) by the loss of a language model.

    plain: fp32 log-probabilities are kept; at work the stack holds `MemoryRules.logit_bytes` in all. fused: the
    gradient overwrites the logits and is kept (Liger-Kernel cross_entropy.py). chunked: logits of as many rows at a
    time as make them no larger than the hidden states, whose gradient is kept (fused_linear_cross_entropy.py).
    """
    width = DTYPE_BYTES[setting.precision]
    logits = sum(op_inputs(op)[0].elements(load, setting.shard) for op in layer.ops)
    if setting.technique.cross_entropy == "fused":
        return logits * width, 0.0
    rows = logits / max(1, sum(op_inputs(op)[0].local_width(setting.shard) for op in layer.ops))
    if setting.technique.cross_entropy == "chunked":
        return rows * hidden * width, rows * hidden * (2 * width + 2 * FP32_BYTES)
    return logits * FP32_BYTES, logits * (memory_rules(setting.technique.stack).logit_bytes - FP32_BYTES)
