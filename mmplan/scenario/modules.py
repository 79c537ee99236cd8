"""Modules and edges of a scenario file as a `Model`, with the checks that need more than one key."""

from dataclasses import replace

from mmplan.scenario.attention_forms import Mla
from mmplan.scenario.document import Document, KeyPath
from mmplan.scenario.edges import check_edges, edges_from_spec, output_width_of_spec
from mmplan.scenario.scenario import (
    AudioInput,
    Modality,
    Model,
    ModelModule,
    Moe,
    Projector,
    TextInput,
    Transformer,
    VisionInput,
    Vocabulary,
)
from mmplan.scenario.schema import (
    AudioSpec,
    BlockSpec,
    LanguageSpec,
    ModelSpec,
    ModuleSpec,
    MoeSpec,
    ProjectorSpec,
    TextSpec,
    VisionSpec,
)


def model_from_spec(name: str, spec: ModelSpec, document: Document) -> Model:
    """The model of a file that lists its modules and edges.

    Raises:
        InputError: a dimension, an edge or a width does not fit.
    """
    at: KeyPath = ("model", "modules")
    if not spec.modules:
        raise document.error(at, "expected at least one module, found none")
    edges = edges_from_spec(spec, document)
    modules = []
    for module_name, module_spec in spec.modules.items():
        crossing = (e.producer for e in edges if e.consumer == module_name and e.kind == "cross_attention")
        cross_from = next(crossing, None)
        width = output_width_of_spec(spec.modules[cross_from]) if cross_from is not None else None
        modules.append(_module(module_name, module_spec, width, document))
    model = Model(name=name, modules=tuple(modules), edges=edges)
    check_edges(model, document)
    return replace(model, modules=tuple(replace(m, modality=_modality(m, model)) for m in modules))


def _modality(module: ModelModule, model: Model) -> Modality:
    """A projector has its producer's modality; a language model that another one feeds speaks."""
    for edge in model.edges:
        if edge.consumer == module.name and edge.kind == "input":
            return _modality(model.module(edge.producer), model)
        if edge.consumer == module.name and edge.kind == "hidden":
            return "speech"
    return module.modality


def _module(name: str, spec: ModuleSpec, cross_width: int | None, document: Document) -> ModelModule:
    at: KeyPath = ("model", "modules", name)
    if isinstance(spec, ProjectorSpec):
        projector = Projector(
            dims=tuple(spec.dims),
            merge=spec.merge,
            pool=spec.pool,
            gated=spec.gated,
            norm=spec.norm,
            norm_before_merge=spec.norm_before_merge,
            bias=spec.bias,
        )
        if spec.dims[0] % spec.merge:
            raise document.error(
                (*at, "dims"), f"dims[0] = {spec.dims[0]} is not a multiple of merge = {spec.merge} joined tokens"
            )
        if spec.gated and len(spec.dims) < 3:
            raise document.error((*at, "gated"), "a gated MLP needs two linears: give dims three widths or more")
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
    if isinstance(spec, TextSpec):
        return ModelModule(
            name=name,
            kind=spec.kind,
            modality="text",
            transformer=transformer,
            vocabulary=Vocabulary(size=spec.vocabulary, pad_to=spec.pad_vocabulary),
            text=_text(spec, at, document),
        )
    vocabulary = Vocabulary(size=spec.vocabulary, tied=spec.tied, width=spec.table_width, pad_to=spec.pad_vocabulary)
    if spec.tied and spec.table_width not in (None, spec.hidden):
        raise document.error((*at, "tied"), f"a tied table has the head's width {spec.hidden}, not {spec.table_width}")
    return ModelModule(name=name, kind=spec.kind, modality="text", transformer=transformer, vocabulary=vocabulary)


def _transformer(spec: BlockSpec, cross_width: int | None, at: KeyPath, document: Document) -> Transformer:
    kv_heads = spec.kv_heads if spec.kv_heads is not None else spec.heads
    language = isinstance(spec, LanguageSpec)
    if spec.heads % kv_heads:
        raise document.error((*at, "kv_heads"), f"heads = {spec.heads} is not a multiple of kv_heads = {kv_heads}")
    if spec.head_dim is None and spec.mla is None and spec.hidden % spec.heads:
        message = f"hidden = {spec.hidden} is not a multiple of heads = {spec.heads}; give head_dim"
        raise document.error((*at, "heads"), message)
    head_dim = spec.head_dim if spec.head_dim is not None else spec.hidden // spec.heads
    rotary = language or (isinstance(spec, TextSpec) and spec.positions == "rotary")
    if rotary and spec.mla is None and head_dim % 2:
        raise document.error((*at, "heads"), f"rotary positions need an even head width, found {head_dim}")
    if spec.global_layers and spec.window_tokens is None:
        raise document.error((*at, "global_layers"), "global_layers has a meaning only together with window_tokens")
    _check_variants(spec, at, document)
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
        causal=spec.causal if isinstance(spec, TextSpec) else language,
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
        sliding=spec.sliding,
        qk_norm_whole=spec.qk_norm_whole,
        activation=spec.activation,
        post_norms=spec.post_norms,
        layer_scale=spec.layer_scale,
        moe=_moe(spec.moe) if spec.moe is not None else None,
        mla=Mla(**spec.mla.model_dump()) if spec.mla is not None else None,
        pad_heads=spec.pad_heads,
    )


def _check_variants(spec: BlockSpec, at: KeyPath, document: Document) -> None:
    """Keys that need or exclude each other."""
    if spec.sliding and spec.window_tokens is None:
        raise document.error((*at, "sliding"), "sliding has a meaning only together with window_tokens")
    if spec.sliding and not isinstance(spec, LanguageSpec):
        raise document.error((*at, "sliding"), "only causal attention slides: the windows of encoders are blocks")
    if spec.qk_norm_whole and not spec.qk_norm:
        raise document.error((*at, "qk_norm_whole"), "qk_norm_whole has a meaning only together with qk_norm")
    if spec.moe is not None and spec.moe.topk > spec.moe.experts:
        message = f"topk = {spec.moe.topk} is more than experts = {spec.moe.experts}"
        raise document.error((*at, "moe", "topk"), message)
    if spec.moe is not None and not any(_moe(spec.moe).in_layer(index) for index in range(spec.layers)):
        where = f"first_dense = {spec.moe.first_dense} and every = {spec.moe.every}"
        raise document.error((*at, "moe"), f"{where} leave none of the {spec.layers} layers with experts")
    if spec.mla is not None:
        if spec.qk_norm:
            raise document.error((*at, "qk_norm"), "latent attention has norms of its own: remove qk_norm")
        if spec.mla.qk_rope % 2:
            message = f"rotary positions need an even width, found {spec.mla.qk_rope}"
            raise document.error((*at, "mla", "qk_rope"), message)
        for key in ("kv_heads", "head_dim"):
            if getattr(spec, key) is not None:
                raise document.error((*at, key), f"with mla the heads follow from its widths: remove {key}")


def _moe(spec: MoeSpec) -> Moe:
    return Moe(
        experts=spec.experts,
        topk=spec.topk,
        expert_ffn=spec.expert_ffn,
        shared_ffn=spec.shared_ffn,
        first_dense=spec.first_dense,
        every=spec.every,
        scoring=spec.scoring,
        router_bias=spec.router_bias,
        capacity_factor=spec.capacity_factor,
        imbalance=spec.imbalance,
    )


def _text(spec: TextSpec, at: KeyPath, document: Document) -> TextInput:
    if spec.positions == "learned" and spec.tokens is None:
        raise document.error((*at, "positions"), "learned positions need a fixed number of tokens")
    return TextInput(tokens=spec.tokens, positions=spec.positions)


def _vision(spec: VisionSpec, at: KeyPath, document: Document) -> VisionInput:
    if spec.image_size is not None and spec.image_size % spec.patch:
        message = f"image_size = {spec.image_size} is not a multiple of patch = {spec.patch}"
        raise document.error((*at, "image_size"), message)
    for key in ("learned_positions", "joint_tiles"):
        if getattr(spec, key) and spec.image_size is None:
            raise document.error((*at, key), f"{key} needs a fixed image_size")
    if spec.position_rows and spec.learned_positions:
        raise document.error((*at, "position_rows"), "expected one table of positions: position_rows is for any size")
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
        position_rows=spec.position_rows,
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
