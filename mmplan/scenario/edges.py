"""Edges of a scenario file: names, kinds and layers, and whether producers fit their consumers.

`vision.8` as producer stands for the tokens after block 8, `llm.0` as consumer for those after block 0.
"""

import re

import networkx as nx

from mmplan.scenario.document import Document, KeyPath, counted, did_you_mean, listed, shown
from mmplan.scenario.model_edges import merged_beside
from mmplan.scenario.scenario import EdgeKind, Model, ModelEdge
from mmplan.scenario.schema import AudioSpec, LanguageSpec, ModelSpec, ModuleSpec, ProjectorSpec, TextSpec, VisionSpec

_LAYER = re.compile(r"^(?P<module>[^.]+)\.(?P<index>\d{1,6})$")


def output_width_of_spec(spec: ModuleSpec) -> int:
    return spec.dims[-1] if isinstance(spec, ProjectorSpec) else spec.hidden


def edges_from_spec(spec: ModelSpec, document: Document) -> tuple[ModelEdge, ...]:
    """The edges of a file, names known and kinds filled in.

    Raises:
        InputError: an edge names an unknown module or block, or has a kind that does not fit.
    """
    assert spec.modules is not None
    result: list[ModelEdge] = []
    for index, words in enumerate(spec.edges or []):
        at: KeyPath = ("model", "edges", index)
        if len(words) not in (2, 3):
            raise document.error(at, f"expected [producer, consumer], found {counted(len(words), 'name')}")
        producer, from_layer = _end(spec, words[0], at, document)
        consumer, to_layer = _end(spec, words[1], at, document)
        if any((edge.producer, edge.consumer) == (producer, consumer) for edge in result):
            raise document.error(at, f"the edge {producer} -> {consumer} stands twice")
        kind = _edge_kind(spec, (producer, consumer, *words[2:]), at, document, adds=to_layer is not None)
        if from_layer is not None and kind != "input":
            raise document.error(at, f"only a projector reads the tokens of an inner block: '{consumer}' is none")
        result.append(
            ModelEdge(
                producer=producer, consumer=consumer, kind=kind, producer_layer=from_layer, consumer_layer=to_layer
            )
        )
    return tuple(result)


def _end(spec: ModelSpec, name: str, at: KeyPath, document: Document) -> tuple[str, int | None]:
    """Module and block of one end of an edge."""
    assert spec.modules is not None
    match = _LAYER.match(name)
    module = match["module"] if match is not None else name
    if module not in spec.modules:
        hint = did_you_mean(module, spec.modules) or f"; modules: {listed(spec.modules)}"
        raise document.error(at, f"unknown module {shown(module)}{hint}")
    if match is None:
        return module, None
    block = spec.modules[module]
    if isinstance(block, ProjectorSpec):
        raise document.error(at, f"'{module}' is a projector and has no blocks")
    if int(match["index"]) >= block.layers:
        raise document.error(at, f"block {match['index']} does not exist: '{module}' has {block.layers}")
    return module, int(match["index"])


def _edge_kind(spec: ModelSpec, words: tuple[str, ...], at: KeyPath, document: Document, *, adds: bool) -> EdgeKind:
    assert spec.modules is not None
    producer, consumer = spec.modules[words[0]], spec.modules[words[1]]
    if isinstance(consumer, VisionSpec | AudioSpec | TextSpec):
        raise document.error(at, f"'{words[1]}' reads the data and takes no edge: its kind is {consumer.kind}")
    if adds:
        fitting: tuple[EdgeKind, ...] = ("add",)
    elif isinstance(consumer, ProjectorSpec):
        fitting = ("input",)
    elif isinstance(producer, LanguageSpec):
        fitting = ("hidden",)
    else:
        fitting = ("cross_attention", "merge") if consumer.cross_layers else ("merge",)
    if len(words) == 2:
        return fitting[0]
    for kind in fitting:
        if kind == words[2]:
            return kind
    raise document.error(at, f"expected {listed(fitting)} as kind of this edge, found {shown(words[2])}")


def check_edges(model: Model, document: Document) -> None:
    """Acyclic, every module used and fed, widths fitting.

    Raises:
        InputError: otherwise.
    """
    edges: KeyPath = ("model", "edges")
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(module.name for module in model.modules)
    graph.add_edges_from((edge.producer, edge.consumer) for edge in model.edges)
    if not nx.is_directed_acyclic_graph(graph):
        cycle = [producer for producer, _ in nx.find_cycle(graph)]
        raise document.error(edges, f"the edges form a cycle: {' -> '.join([*cycle, cycle[0]])}")
    for module in model.modules:
        at: KeyPath = ("model", "modules", module.name)
        kinds = [edge.kind for edge in model.edges if edge.consumer == module.name]
        if module.kind == "projector" and len(kinds) != 1:
            raise document.error(at, f"a projector has exactly one edge into it, found {len(kinds)}")
        for kind in ("cross_attention", "hidden"):
            if kinds.count(kind) > 1:
                raise document.error(at, f"expected at most one {kind} edge into '{module.name}', found several")
        if module.kind != "language_model" and graph.out_degree(module.name) == 0:
            raise document.error(at, f"nothing reads the tokens of '{module.name}': no edge starts there")
    for index, edge in enumerate(model.edges):
        _check_width(model, edge, (*edges, index), document)
        _check_layers(model, edge, (*edges, index), document)


def _check_width(model: Model, edge: ModelEdge, at: KeyPath, document: Document) -> None:
    producer, consumer = model.module(edge.producer), model.module(edge.consumer)
    width = producer.output_width
    if consumer.projector is not None:
        merge, expected = consumer.projector.merge, consumer.projector.dims[0]
        if width * merge != expected:
            given = f"{merge} x {width} = {merge * width}" if merge > 1 else str(width)
            raise document.error(at, f"'{edge.producer}' gives width {given}, '{edge.consumer}' takes {expected}")
    elif edge.kind in ("merge", "add") and width != consumer.output_width:
        message = f"'{edge.producer}' gives width {width}, '{edge.consumer}' has hidden {consumer.output_width}"
        raise document.error(at, message if producer.projector is not None else f"{message}; put a projector between")
    elif edge.kind == "hidden" and consumer.vocabulary is not None and consumer.vocabulary.width not in (None, width):
        raise document.error(at, f"'{edge.consumer}' has table_width {consumer.vocabulary.width}, needs {width}")


def _check_layers(model: Model, edge: ModelEdge, at: KeyPath, document: Document) -> None:
    """Edges from and to inner blocks."""
    producer = model.module(edge.producer)
    if edge.producer_layer is not None:
        if producer.vision is not None and producer.vision.class_token:
            raise document.error(at, f"inner blocks of '{producer.name}' hold class tokens, which no projector drops")
        if producer.audio is not None and producer.audio.pool > 1:
            raise document.error(at, f"inner blocks of '{producer.name}' hold tokens that are not pooled yet")
    if edge.kind == "add":
        try:
            beside = model.module(merged_beside(model, edge))
        except ValueError as error:
            raise document.error(at, str(error)) from None
        merges = [module.projector.merge if module.projector is not None else 1 for module in (producer, beside)]
        if merges[0] != merges[1]:
            message = f"'{producer.name}' joins {merges[0]} tokens and '{beside.name}' {merges[1]}: their rows differ"
            raise document.error(at, message)
        same = [e for e in model.edges if e.kind == "add" and e.consumer == edge.consumer]
        if sum(e.consumer_layer == edge.consumer_layer for e in same) > 1:
            raise document.error(at, f"two edges add to block {edge.consumer_layer} of '{edge.consumer}'")
