"""Attention that reads the keys which an index of its own has chosen (DeepSeek sparse attention, arXiv 2512.02556):
DeepSeek V3.2 and GLM-5, and Qwen4-Exp, GLM-5.3 and Hunyuan 4, whose blocks stand between residual streams. It is priced
over as many keys as are chosen, as if they were the last ones."""

from dataclasses import replace

from mmplan.scenario.attention_forms import GatedDelta
from mmplan.scenario.formats.hf.blocks_by_layer import each, experts_in, kinds_of_layers
from mmplan.scenario.formats.hf.experts import latent_attention, moe_of, softmax_of, sparse_layers
from mmplan.scenario.formats.hf.mixers import delta_of
from mmplan.scenario.formats.hf.streams import (
    RMS,
    between,
    gated,
    gated_end,
    hashed_words,
    rows_of_hashes,
    weighed,
    weighted,
)
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.scenario import Transformer
from mmplan.scenario.steps import Attend, Choose, Experts, Fold, Form, Kept, Mlp, Step, Steps, Widen, residual

LINEAR, INDEXED = "linear_attention", "indexed_attention"
MAX_STREAMS = 100


def _kinds(text: Fields, layers: int, interval: int | None) -> list[str]:
    """Files say `full_attention` for layers with an index."""
    known = (LINEAR, INDEXED, "full_attention") if interval else (INDEXED, "full_attention")
    words = kinds_of_layers(text, layers, known, lambda i: LINEAR if interval and (i + 1) % interval else INDEXED)
    return [LINEAR if word == LINEAR else INDEXED for word in words]


def qwen4(text: Fields, shape: Transformer) -> Transformer:
    """The gated delta rule but for every fourth layer; no norms but those of the streams."""
    kinds = _kinds(text, shape.layers, text.optional("full_attention_interval", most=2_000) or 4)
    delta = delta_of(text)
    budget = text.count("indexer_budget", most=100_000_000) if INDEXED in kinds else None

    def block(index: int, plain: Transformer) -> Transformer:
        if kinds[index] == LINEAR:
            return replace(plain, qkv_bias=False, out_bias=False, delta=delta)
        return replace(plain, qk_norm=True, out_gate="column", window_tokens=budget, sliding=True)

    width, shared = text.count("moe_intermediate_size"), text.count("shared_expert_intermediate_size")
    moe = replace(moe_of(text, "num_experts", width, scoring=softmax_of(text)), shared_ffn=shared, shared_gate=True)
    return each(replace(shape, final_norm=False, moe=moe), block)


def form_of_qwen4(text: Fields, shape: Transformer) -> Form:
    hidden, streams, low = shape.hidden, text.count("hc_count", least=2, most=MAX_STREAMS), text.count("hc_lowrank")
    kinds = _kinds(text, shape.layers, text.optional("full_attention_interval", most=2_000) or 4)
    tables = text.indices("ple_layer_ids", shape.layers + 1) if text.get("ple_layer_ids") else ()
    index: Steps = ()
    if INDEXED in kinds:
        text.refuse_unless("indexer_kv_heads", 1, why="the class has one key for all heads of the index")
        heads, width = text.count("indexer_n_heads"), text.count("indexer_head_dim")
        pool = text.count("indexer_compress_ratio", most=100_000)
        index = (Choose(heads=heads, head_dim=width, pool=pool), Kept(size=2 * width))
    blocks: list[Steps] = []
    for layer, kind in enumerate(kinds):
        steps: Steps = (Widen(times=streams),) if layer == 0 else ()
        if layer + 1 in tables:
            steps += _words(text, shape, streams, tables.index(layer + 1))
        attention: Steps = (*(index if kind == INDEXED else ()), Attend())
        steps += (gated(streams, hidden, low, *attention), gated(streams, hidden, low, Experts()))
        blocks.append(steps + (gated_end(streams, hidden, low) if layer == shape.layers - 1 else ()))
    return Form(blocks=tuple((1, steps) for steps in blocks), streams=between(streams, shape.layers))


def _words(text: Fields, shape: Transformer, streams: int, table: int) -> Steps:
    grams = text.count("ngram_size", least=2, most=100)
    heads = (grams - 1) * text.count("heads_per_ngram", most=1_000)
    width = text.optional("ple_embed_dim") or shape.hidden
    if width % heads:
        raise text.error("ple_embed_dim", f"{width} is not a multiple of {heads} heads of n-grams")
    base = text.count("ngram_vocab_size_base", most=1_000_000_000)
    rows = rows_of_hashes(base, heads, table, text.count("make_ngram_vocab_size_divisible_by"))
    taps = text.count("ple_conv_kernel_size", most=1_000)
    return hashed_words(streams, shape.hidden, heads=heads, rows=rows, width=width, taps=taps)


def _experts(text: Fields, shape: Transformer, first: int) -> Transformer:
    """Dense layers first, one set of shared experts, sigmoids."""
    width, shared = text.count("moe_intermediate_size"), text.count("n_shared_experts", least=0, most=1_000)
    scoring = "sigmoid" if text.flag("norm_topk_prob") else "sigmoid_plain"
    moe = replace(moe_of(text, "n_routed_experts", width, scoring=scoring), shared_ffn=width * shared)  # type: ignore[arg-type]
    return experts_in(shape, moe, sparse_layers(text, shape.layers, first))


def glm5(text: Fields, shape: Transformer) -> Transformer:
    """Kimi delta attention but for every fourth layer, which attends without positions."""
    kinds = _kinds(text, shape.layers, 4)
    text.refuse_unless("qk_rope_head_dim", 0, why="the class has no positions in its attention")
    older = text.values.get("linear_attn_config")
    given = replace(text, values=older, path=text.key("linear_attn_config")) if isinstance(older, dict) else text
    names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
    names["short_conv_kernel_size"] = "linear_conv_kernel_dim"
    width, heads, kernel = (
        given.count(old, most=100_000) if isinstance(older, dict) and old in older else text.count(new, most=100_000)
        for old, new in names.items()
    )
    delta = GatedDelta(key_heads=heads, value_heads=heads, key_dim=width, value_dim=width, conv=kernel, gate_rank=width)
    latent = latent_attention(text, shape)
    chosen = text.count("index_topk", most=100_000_000)
    latent = replace(latent, window_tokens=chosen, sliding=True)
    linear = replace(shape, delta=delta, qkv_bias=False, out_bias=False)
    stack = _experts(text, shape, first=3)

    def block(index: int, plain: Transformer) -> Transformer:
        base = linear if kinds[index] == LINEAR else latent
        return replace(base, moe=plain.moe if plain.moe and plain.moe.in_layer(index) else None)

    return each(stack, block)


def _chooses(text: Fields, layers: int, usual: list[bool]) -> list[bool]:
    """Which layers have an index of their own; the others take the choice of the last one that has."""
    words = text.words("indexer_types", layers)
    if words is None:
        return usual
    for index, word in enumerate(words):
        if word not in ("full", "shared"):
            raise text.error("indexer_types", f"expected 'full' or 'shared' for layer {index}, found '{word:.40}'")
    return [word == "full" for word in words]


def index_steps(text: Fields, shape: Transformer, pool: int) -> Steps:
    """Scores of queries that attention's own narrow rows give; weights of heads, a norm, and what pools keys."""
    heads, width = text.count("index_n_heads"), text.count("index_head_dim")
    kept = heads * shape.hidden + 2 * width + (pool * width + width * shape.hidden if pool > 1 else 0)
    return (Choose(heads=heads, head_dim=width, pool=pool, low=text.count("q_lora_rank")), Kept(size=kept))


def _often(text: Fields, layers: int) -> list[bool]:
    """The same of GLM-5 and 5.3, whose older files give letters, or how often a layer has one."""
    often, offset = text.optional("index_topk_freq", most=2_000) or 1, text.optional("index_skip_topk_offset", least=0)
    offset = 2 if offset is None else offset
    pattern = text.get("index_topk_pattern")
    usual = [max(index - offset + 1, 0) % often == 0 for index in range(layers)]
    if isinstance(pattern, str | list) and len(pattern) == layers:
        usual = [word in ("F", "full") for word in pattern]
    return _chooses(text, layers, usual)


def form_of_glm5(text: Fields, shape: Transformer) -> Form:
    streams, kinds = text.count("hc_mult", most=MAX_STREAMS), _kinds(text, shape.layers, 4)
    chooses = _often(text, shape.layers)
    index = index_steps(text, shape, text.count("index_kpool", most=100_000))
    return _between(shape, streams, [index if one and kinds[i] == INDEXED else () for i, one in enumerate(chooses)])


def _between(shape: Transformer, streams: int, indices: list[Steps], *, sinks: int = 0, mixed: bool = True) -> Form:
    """Blocks between streams; at the end these are averaged, or weighed where they are not mixed."""
    blocks: list[Steps] = []
    for layer, index in enumerate(indices):
        block = shape.at(layer)
        body: Step = Experts() if block.moe is not None and block.moe.in_layer(layer) else Mlp()
        steps: Steps = (Widen(times=streams),) if layer == 0 else ()
        steps += weighted(streams, RMS, *index, Attend(), mixed=mixed)
        steps += (*weighted(streams, RMS, body, mixed=mixed), *((Kept(size=sinks),) if sinks else ()))
        if layer == shape.layers - 1:
            steps += (Fold(parts=streams),) if mixed else (weighed(0, streams), Fold(parts=streams), Kept(size=1))
        blocks.append(steps)
    return Form(blocks=tuple((1, steps) for steps in blocks), streams=between(streams, shape.layers))


def hunyuan4(text: Fields, shape: Transformer) -> Transformer:
    """Latent attention with a gate of each column and a sink for each head."""
    _kinds(text, shape.layers, None)
    chosen = text.count("index_topk", most=100_000_000)
    shape = replace(latent_attention(text, shape), window_tokens=chosen, sliding=True, out_gate="column")
    return _experts(text, shape, first=1)


def form_of_hunyuan4(text: Fields, shape: Transformer) -> Form:
    usual = [index == 0 or (index - 1) % 4 == 0 for index in range(shape.layers)]
    index = index_steps(text, shape, pool=1)
    indices = [index if one else () for one in _chooses(text, shape.layers, usual)]
    return _between(shape, text.count("hc_mult", most=MAX_STREAMS), indices, sinks=shape.heads, mixed=False)


def dsa(text: Fields, shape: Transformer) -> Transformer:
    """DeepSeek V3.2 and GLM-5: DeepSeek's blocks with an index in each, or that of an earlier one."""
    _kinds(text, shape.layers, None)
    chosen = text.count("index_topk", most=100_000_000)
    shape = replace(latent_attention(text, shape), window_tokens=chosen, sliding=True)
    first = text.optional("first_k_dense_replace", least=0, most=1_000_000)
    return _experts(text, shape, first=3 if first is None else first)


def form_of_dsa(text: Fields, shape: Transformer) -> Form:
    index, chooses = index_steps(text, shape, pool=1), _often(text, shape.layers)
    blocks: list[tuple[int, Steps]] = []
    for layer, one in enumerate(chooses):
        block = shape.at(layer)
        body: Step = Experts() if block.moe is not None and block.moe.in_layer(layer) else Mlp()
        blocks.append((1, (residual(RMS, *(index if one else ()), Attend()), residual(RMS, body))))
    return Form(blocks=tuple(blocks))
