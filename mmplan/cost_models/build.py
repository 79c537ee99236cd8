"""From a scenario to its computation graph: layers, edges, and where gradients flow.

A module becomes `m.embed`, `m.0` .. `m.N-1`, and for language models `m.head`, `m.loss`; a projector is `m.0`. What is
trained decides, layer by layer along the graph, which values carry gradients.
"""

from collections import Counter
from dataclasses import dataclass, replace

from mmplan.cost_models.blocks import projector_ops
from mmplan.cost_models.embeddings import (
    audio_embed_ops,
    end_ops,
    head_ops,
    loss_ops,
    patch_embed_ops,
    stored_ops,
    text_position_ops,
    token_embed_ops,
)
from mmplan.cost_models.graph import ComputationGraph, Edge
from mmplan.cost_models.layer import Layer, LayerKind, Source, splits_rows, values_with_grad
from mmplan.cost_models.module_order import upstream_first
from mmplan.cost_models.ops import AddRows, Embedding, Interleave, Op, op_inputs
from mmplan.cost_models.recorded_layers import recorded_ops
from mmplan.cost_models.recorded_ops import RecordedRest
from mmplan.cost_models.step_ops import step_ops
from mmplan.cost_models.transformer_block import block_ops
from mmplan.cost_models.values import CONTEXT, TOKENS, Rows, Value
from mmplan.errors import CostModelError
from mmplan.scenario.layer_ids import last_layer_id
from mmplan.scenario.model_edges import merged_beside
from mmplan.scenario.recorded import Recorded
from mmplan.scenario.scenario import EdgeKind, Model, ModelModule, Scenario, Transformer
from mmplan.scenario.steps import Kept


@dataclass(frozen=True, slots=True)
class _Draft:
    """A layer before gradients are known."""

    id: str
    module: ModelModule
    kind: LayerKind
    index: int
    sources: tuple[Source, ...]
    ops: tuple[Op, ...]


def build_graph(scenario: Scenario) -> ComputationGraph:
    """The layer graph of a scenario's model.

    Raises:
        CostModelError: widths of producer and consumer differ, or a combination of edges that layers do not support.
    """
    whole, wide = scenario.constraints.forbidding("compression"), scenario.constraints.forbidding("fp8")
    layers, readers = model_layers(scenario.model), dict[str, dict[str, None]]()
    for layer in layers:
        for source in layer.sources:
            readers.setdefault(source.producer, {})[layer.module] = None
    finished = {layer.id: layer for layer in layers}
    edges = [_edge(finished, source, layer) for layer in layers for source in layer.sources]
    read = Counter(edge.producer for edge in edges)
    edges = [edge if read[edge.producer] == 1 else replace(edge, placed="") for edge in edges]
    placed = {edge.producer for edge in edges if edge.placed}
    layers = [
        replace(
            x,
            whole_gradient=x.id in whole,
            no_fp8=x.id in wide,
            readers=tuple(name for name in readers.get(x.id, ()) if name != x.module),
            placed=x.id in placed,
        )
        for x in layers
    ]
    return ComputationGraph(layers, edges)


def model_layers(model: Model) -> list[Layer]:
    """The layers of a model, module by module; CostModelError as in `build_graph`."""
    if model.recorded is not None:
        return _recorded_layers(model, model.recorded)
    drafts = {module.name: _module_drafts(model, module) for module in model.modules}
    finished: dict[str, Layer] = {}
    for module in upstream_first(model):
        for draft in drafts[module.name]:
            finished[draft.id] = _finish(draft, finished)
    return [finished[draft.id] for module in model.modules for draft in drafts[module.name]]


def _recorded_layers(model: Model, recorded: Recorded) -> list[Layer]:
    """In the order in which the model was seen to use them, whatever their modules."""
    finished: dict[str, Layer] = {}
    for index, layer in enumerate(recorded.layers):
        module = model.module(layer.module)
        sources = tuple(Source(read.layer, f"x{number}") for number, read in enumerate(layer.reads))
        kind: LayerKind = "end" if layer is recorded.layers[-1] else "block" if layer.block else "unit"
        ops = recorded_ops(layer, recorded, module.training)
        made = _finish(_Draft(layer.id, module, kind, index, sources, ops), finished)
        finished[layer.id] = replace(made, pieces=layer.pieces)
    return list(finished.values())


def _finish(draft: _Draft, layers: dict[str, Layer]) -> Layer:
    with_grad = tuple(source.value for source in draft.sources if layers[source.producer].has_backward)
    return Layer(
        id=draft.id,
        module=draft.module.name,
        modality=draft.module.modality,
        precision=draft.module.precision,
        kind=draft.kind,
        index=draft.index,
        sources=draft.sources,
        ops=draft.ops,
        grad_values=values_with_grad(draft.ops, with_grad),
    )


def _edge(layers: dict[str, Layer], source: Source, consumer: Layer) -> Edge:
    producer = layers[source.producer]
    value = next(value for op in consumer.ops for value in op_inputs(op) if value.name == source.value)
    recorded = isinstance(consumer.ops[-1], RecordedRest)
    # of what was recorded each reader takes its part, of so many samples together
    width = -(-value.width // value.rows.per) if recorded else producer.output.width
    if not recorded and (wanted := value.width) != width:
        raise CostModelError(f"{producer.id} hands on tokens of width {width}, {consumer.id} reads width {wanted}")
    inside = recorded or producer.module == consumer.module or not _is_last(layers, producer)
    return Edge(
        producer=producer.id,
        consumer=consumer.id,
        width=width,
        load_module=producer.module,
        load_field="tokens" if inside else "outputs",
        carries_grad=producer.has_backward,
        cuttable=consumer.kind not in ("loss", "end"),
        precision=producer.precision,
        placed="" if splits_rows(producer) or not splits_rows(consumer) else _places(source, consumer),
    )


def _places(source: Source, consumer: Layer) -> str:
    """The key of the places that rows take in the reader's sequence; empty where they do anything else there."""
    readers = [op for op in consumer.ops if any(value.name == source.value for value in op_inputs(op))]
    match readers:
        case [Interleave() as op]:
            return next(key for part, key in zip(op.parts, op.keys, strict=True) if part.name == source.value)
        case [AddRows() as op] if op.b.name == source.value:
            return op.key
        case _:
            return ""


def _is_last(layers: dict[str, Layer], producer: Layer) -> bool:
    """Whether no block of the module follows."""
    return f"{producer.module}.{producer.index + 1}" not in layers


def _feeding(model: Model, module: ModelModule, kind: EdgeKind) -> tuple[ModelModule, ...]:
    return tuple(model.module(e.producer) for e in model.edges if e.consumer == module.name and e.kind == kind)


def _only(module: ModelModule, kind: EdgeKind, producers: tuple[ModelModule, ...]) -> ModelModule:
    if len(producers) != 1:
        raise CostModelError(f"module {module.name} needs exactly one {kind} edge, has {len(producers)}")
    return producers[0]


def _transformer(module: ModelModule) -> Transformer:
    if module.transformer is None:
        raise CostModelError(f"module {module.name} of kind {module.kind} has no transformer")
    return module.transformer


def _module_drafts(model: Model, module: ModelModule) -> list[_Draft]:
    if module.projector is not None:
        producer = _only(module, "input", _feeding(model, module, "input"))
        if module.form is not None:
            x = Value("x", CONTEXT, producer.output_width)
            ops = step_ops(module.form.front, x, TOKENS, module.training)
        else:
            ops = projector_ops(module.projector, module.training, producer.output_width)
        ops += stored_ops(module, ops[-1].y)
        layer = next(edge.producer_layer for edge in model.edges if edge.consumer == module.name)
        source = Source(last_layer_id(producer) if layer is None else f"{producer.name}.{layer}", "x")
        return [_Draft(f"{module.name}.0", module, "projector", 0, (source,), ops)]
    drafts = [_embed_draft(model, module), *_block_drafts(model, module)]
    if module.kind == "language_model" and module.vocabulary is not None:
        shape, head = _transformer(module), f"{module.name}.head"
        ops = head_ops(module.vocabulary, shape.hidden, module.training)
        drafts.append(_Draft(head, module, "head", 0, (Source(last_layer_id(module), "x"),), ops))
        loss = loss_ops(module.vocabulary)
        drafts.append(_Draft(f"{module.name}.loss", module, "loss", 0, (Source(head, "x"),), loss))
    return drafts


def _embed_draft(model: Model, module: ModelModule) -> _Draft:
    shape, layer_id = _transformer(module), f"{module.name}.embed"
    if module.kind == "encoder":
        return _reading_draft(model, module, layer_id)
    if module.form is not None and module.form.raw_width is not None:
        width = module.form.raw_width
        raw = Value("raw", Rows("input_elements", per=width), width)
        ops = step_ops(module.form.front, raw, TOKENS, module.training)
        kind: LayerKind = "patch_embed" if module.vision is not None else "audio_embed"
        return _Draft(layer_id, module, kind, 0, (), ops + stored_ops(module, ops[-1].y))
    if module.vision is not None:
        ops = patch_embed_ops(module.vision, shape, module.training)
        return _Draft(layer_id, module, "patch_embed", 0, (), ops + stored_ops(module, ops[-1].y))
    if module.audio is not None:
        ops = audio_embed_ops(module.audio, shape, module.training)
        return _Draft(layer_id, module, "audio_embed", 0, (), ops + stored_ops(module, ops[-1].y))
    if module.vocabulary is None:
        raise CostModelError(f"module {module.name} has none of vision, audio and vocabulary: nothing to embed")
    merged, talkers = _feeding(model, module, "merge"), _feeding(model, module, "hidden")
    if any(producer.name == "text" for producer in merged):
        raise CostModelError(
            f"module {module.name} merges a module named 'text', the name of its own tokens: rename it"
        )
    if talkers and (len(talkers) > 1 or _feeding(model, module, "cross_attention")):
        raise CostModelError(f"module {module.name} can have one hidden edge and then no cross-attention edge")
    hidden_source = (talkers[0].name, talkers[0].output_width) if talkers else None
    names = tuple(producer.name for producer in merged)
    ops = token_embed_ops(module.vocabulary, shape.hidden, module.training, names, hidden_source)
    if module.text is not None and module.text.positions == "learned":
        ops += text_position_ops(module.text, shape.hidden, module.training, ops[-1].y)
    ops += stored_ops(module, ops[-1].y)
    sources = tuple(Source(last_layer_id(producer), producer.name) for producer in (*merged, *talkers))
    return _Draft(layer_id, module, "token_embed", 0, sources, ops)


def _reading_draft(model: Model, module: ModelModule, layer_id: str) -> _Draft:
    """First layer of a module that reads another one's tokens: its queries, or what its front makes of the tokens."""
    producer, shape = _only(module, "input", _feeding(model, module, "input")), _transformer(module)
    x, trained = Value("x", CONTEXT, producer.output_width), module.training.mode == "full"
    assert module.form is not None
    ops: tuple[Op, ...]
    if module.form.queries:
        y = Value("queries", TOKENS, shape.hidden)
        ops = (Embedding(name="queries", y=y, size=module.form.queries, unit=module.form.queries, trainable=trained),)
        ops += step_ops(module.form.front, y, TOKENS, module.training) if module.form.front else ()
        return _Draft(layer_id, module, "token_embed", 0, (), ops + stored_ops(module, ops[-1].y))
    ops = step_ops(module.form.front or (Kept(size=0),), x, TOKENS, module.training)
    source = Source(last_layer_id(producer), "x")
    return _Draft(layer_id, module, "projector", 0, (source,), ops + stored_ops(module, ops[-1].y))


def _added(model: Model, module: ModelModule, index: int) -> tuple[tuple[str, str], ...]:
    """(module whose tokens block `index` adds, module that has merged the same encoder's tokens), of each."""
    edges = (edge for edge in model.edges if edge.kind == "add" and edge.consumer == module.name)
    return tuple((edge.producer, merged_beside(model, edge)) for edge in edges if edge.consumer_layer == index)


def _block_drafts(model: Model, module: ModelModule) -> list[_Draft]:
    shape, contexts = _transformer(module), _feeding(model, module, "cross_attention")
    if module.kind == "encoder":
        contexts = _feeding(model, module, "input")
    rope = module.audio is None and not (module.vision is not None and module.vision.learned_positions)
    rope = rope and (module.text is None or module.text.positions == "rotary")
    drafts: list[_Draft] = []
    for index in range(shape.layers):
        before = f"{module.name}.{index - 1}" if index else f"{module.name}.embed"
        sources: tuple[Source, ...] = (Source(before, "x"),)
        width: int | None = None
        if index in shape.cross_layers:
            producer = _only(module, "cross_attention", contexts)
            width = shape.cross_width or producer.output_width
            sources = (*sources, Source(last_layer_id(producer), "context"))
        added = _added(model, module, index)
        sources = (*sources, *(Source(last_layer_id(model.module(name)), name) for name, _ in added))
        ops = block_ops(shape, module.training, index, rope=rope, context_width=width, added=added, form=module.form)
        if index == shape.layers - 1:
            ops += end_ops(module.vision, module.audio, shape, module.training, ops[-1].y)
        kind: LayerKind = "cross_block" if width is not None else "block"
        drafts.append(_Draft(f"{module.name}.{index}", module, kind, index, sources, ops))
    return drafts
