"""Modules and edges of a scenario file as a `Model`, with the checks that need more than one key."""

from dataclasses import replace

import networkx as nx

from mmplan.scenario.document import Document, KeyPath, counted, did_you_mean, listed, shown
from mmplan.scenario.scenario import (
    AudioInput,
    EdgeKind,
    Modality,
    Model,
    ModelEdge,
    ModelModule,
    Projector,
    Transformer,
    VisionInput,
    Vocabulary,
)
from mmplan.scenario.schema import AudioSpec, BlockSpec, LanguageSpec, ModelSpec, ModuleSpec, ProjectorSpec, VisionSpec


def model_from_spec(name: str, spec: ModelSpec, document: Document) -> Model:
    """The model of a file that lists its modules and edges.

    Raises:
        InputError: a dimension, an edge or a width does not fit.
    """
    at: KeyPath = ("model", "modules")
    if not spec.modules:
        raise document.error(at, "expected at least one module, found none")
    producers = _edge_names(spec, document)
    modules = []
    for module_name, module_spec in spec.modules.items():
        cross_from = next((p for p, c, kind in producers if c == module_name and kind == "cross_attention"), None)
        width = output_width_of_spec(spec.modules[cross_from]) if cross_from is not None else None
        modules.append(_module(module_name, module_spec, width, document))
    edges = tuple(ModelEdge(producer=p, consumer=c, kind=kind) for p, c, kind in producers)
    model = Model(name=name, modules=tuple(modules), edges=edges)
    _check_edges(model, document)
    return replace(model, modules=tuple(replace(m, modality=_modality(m, model)) for m in modules))


def _modality(module: ModelModule, model: Model) -> Modality:
    """A projector has its producer's modality; a language model that another one feeds speaks."""
    for edge in model.edges:
        if edge.consumer == module.name and edge.kind == "input":
            return _modality(model.module(edge.producer), model)
        if edge.consumer == module.name and edge.kind == "hidden":
            return "speech"
    return module.modality


def output_width_of_spec(spec: ModuleSpec) -> int:
    return spec.dims[-1] if isinstance(spec, ProjectorSpec) else spec.hidden


def _edge_names(spec: ModelSpec, document: Document) -> list[tuple[str, str, EdgeKind]]:
    """(producer, consumer, kind) of each edge, names known and kinds filled in."""
    assert spec.modules is not None
    result: list[tuple[str, str, EdgeKind]] = []
    for index, words in enumerate(spec.edges or []):
        at: KeyPath = ("model", "edges", index)
        if len(words) not in (2, 3):
            raise document.error(at, f"expected [producer, consumer], found {counted(len(words), 'name')}")
        for name in words[:2]:
            if name not in spec.modules:
                hint = did_you_mean(name, spec.modules) or f"; modules: {listed(spec.modules)}"
                raise document.error(at, f"unknown module {shown(name)}{hint}")
        producer, consumer = words[:2]
        if any((p, c) == (producer, consumer) for p, c, _ in result):
            raise document.error(at, f"the edge {producer} -> {consumer} stands twice")
        result.append((producer, consumer, _edge_kind(spec, words, at, document)))
    return result


def _edge_kind(spec: ModelSpec, words: list[str], at: KeyPath, document: Document) -> EdgeKind:
    assert spec.modules is not None
    producer, consumer = spec.modules[words[0]], spec.modules[words[1]]
    if isinstance(consumer, VisionSpec | AudioSpec):
        raise document.error(at, f"'{words[1]}' reads the data and takes no edge: its kind is {consumer.kind}")
    if isinstance(consumer, ProjectorSpec):
        fitting: tuple[EdgeKind, ...] = ("input",)
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


def _module(name: str, spec: ModuleSpec, cross_width: int | None, document: Document) -> ModelModule:
    at: KeyPath = ("model", "modules", name)
    if isinstance(spec, ProjectorSpec):
        projector = Projector(
            dims=tuple(spec.dims),
            merge=spec.merge,
            norm=spec.norm,
            norm_before_merge=spec.norm_before_merge,
            bias=spec.bias,
        )
        if spec.dims[0] % spec.merge:
            raise document.error(
                (*at, "dims"), f"dims[0] = {spec.dims[0]} is not a multiple of merge = {spec.merge} joined tokens"
            )
        return ModelModule(name=name, kind="projector", modality="text", projector=projector)
    transformer = _transformer(spec, cross_width, at, document)
    if isinstance(spec, VisionSpec):
        return ModelModule(
            name=name, kind=spec.kind, modality="vision", transformer=transformer, vision=_vision(spec, at, document)
        )
    if isinstance(spec, AudioSpec):
        return ModelModule(
            name=name, kind=spec.kind, modality="audio", transformer=transformer, audio=_audio(spec, at, document)
        )
    vocabulary = Vocabulary(size=spec.vocabulary, tied=spec.tied, width=spec.table_width)
    if spec.tied and spec.table_width not in (None, spec.hidden):
        raise document.error((*at, "tied"), f"a tied table has the head's width {spec.hidden}, not {spec.table_width}")
    return ModelModule(name=name, kind=spec.kind, modality="text", transformer=transformer, vocabulary=vocabulary)


def _transformer(spec: BlockSpec, cross_width: int | None, at: KeyPath, document: Document) -> Transformer:
    kv_heads = spec.kv_heads if spec.kv_heads is not None else spec.heads
    language = isinstance(spec, LanguageSpec)
    if spec.heads % kv_heads:
        raise document.error((*at, "kv_heads"), f"heads = {spec.heads} is not a multiple of kv_heads = {kv_heads}")
    if spec.head_dim is None and spec.hidden % spec.heads:
        message = f"hidden = {spec.hidden} is not a multiple of heads = {spec.heads}; give head_dim"
        raise document.error((*at, "heads"), message)
    head_dim = spec.head_dim if spec.head_dim is not None else spec.hidden // spec.heads
    if language and head_dim % 2:
        raise document.error((*at, "heads"), f"rotary positions need an even head width, found {head_dim}")
    if spec.global_layers and spec.window_tokens is None:
        raise document.error((*at, "global_layers"), "global_layers has a meaning only together with window_tokens")
    cross_layers = spec.cross_layers if isinstance(spec, LanguageSpec) else []
    if cross_layers and cross_width is None:
        raise document.error((*at, "cross_layers"), "no edge brings the tokens that the cross layers attend to")
    for key, indices in (("global_layers", spec.global_layers), ("cross_layers", cross_layers)):
        for index in indices:
            if index >= spec.layers:
                last = spec.layers - 1
                raise document.error((*at, key), f"layer {index} does not exist: layers run from 0 to {last}")
    return Transformer(
        layers=spec.layers,
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=spec.ffn,
        gated_mlp=language if spec.gated_mlp is None else spec.gated_mlp,
        causal=language,
        norm=spec.norm or ("rms" if language else "layer"),
        qkv_bias=not language if spec.qkv_bias is None else spec.qkv_bias,
        key_bias=spec.key_bias,
        out_bias=not language if spec.out_bias is None else spec.out_bias,
        mlp_bias=not language if spec.mlp_bias is None else spec.mlp_bias,
        qk_norm=spec.qk_norm,
        norm_first_extra=isinstance(spec, VisionSpec) and spec.first_norm,
        final_norm=spec.final_norm,
        window_tokens=spec.window_tokens,
        global_layers=tuple(sorted(set(spec.global_layers))),
        cross_layers=tuple(sorted(set(cross_layers))),
        cross_width=cross_width if cross_layers else None,
    )


def _vision(spec: VisionSpec, at: KeyPath, document: Document) -> VisionInput:
    if spec.image_size is not None and spec.image_size % spec.patch:
        message = f"image_size = {spec.image_size} is not a multiple of patch = {spec.patch}"
        raise document.error((*at, "image_size"), message)
    for key in ("learned_positions", "joint_tiles"):
        if getattr(spec, key) and spec.image_size is None:
            raise document.error((*at, key), f"{key} needs a fixed image_size")
    if spec.tiles > 1 and spec.image_size is None:
        raise document.error((*at, "tiles"), "tiles need a fixed image_size")
    if spec.keep_class_token and not spec.class_token:
        raise document.error((*at, "keep_class_token"), "there is no class token to keep: class_token is false")
    return VisionInput(
        patch=spec.patch,
        channels=spec.channels,
        temporal_patch=spec.temporal_patch,
        image_size=spec.image_size,
        class_token=spec.class_token,
        keep_class_token=spec.keep_class_token,
        learned_positions=spec.learned_positions,
        patch_bias=spec.patch_bias,
        tiles=spec.tiles,
        joint_tiles=spec.joint_tiles,
    )


def _audio(spec: AudioSpec, at: KeyPath, document: Document) -> AudioInput:
    if spec.positions and spec.pad_s is not None:
        tokens = -(-round(spec.pad_s * spec.frames_per_s) // 2)
        if tokens > spec.positions:
            message = f"{spec.pad_s:g} s x {spec.frames_per_s} frames / 2 = {tokens} tokens need as many rows, "
            raise document.error((*at, "positions"), message + f"found {spec.positions}")
    return AudioInput(
        mel_bins=spec.mel_bins,
        frames_per_s=spec.frames_per_s,
        pad_s=spec.pad_s,
        pool=spec.pool,
        positions=spec.positions,
    )


def _check_edges(model: Model, document: Document) -> None:
    """Acyclic, every module used and fed, widths fitting."""
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


def _check_width(model: Model, edge: ModelEdge, at: KeyPath, document: Document) -> None:
    producer, consumer = model.module(edge.producer), model.module(edge.consumer)
    width = producer.output_width
    if consumer.projector is not None:
        merge, expected = consumer.projector.merge, consumer.projector.dims[0]
        if width * merge != expected:
            given = f"{merge} x {width} = {merge * width}" if merge > 1 else str(width)
            raise document.error(at, f"'{edge.producer}' gives width {given}, '{edge.consumer}' takes {expected}")
    elif edge.kind == "merge" and width != consumer.output_width:
        message = f"'{edge.producer}' gives width {width}, '{edge.consumer}' has hidden {consumer.output_width}"
        raise document.error(at, message if producer.projector is not None else f"{message}; put a projector between")
    elif edge.kind == "hidden" and consumer.vocabulary is not None and consumer.vocabulary.width not in (None, width):
        raise document.error(at, f"'{edge.consumer}' has table_width {consumer.vocabulary.width}, needs {width}")
