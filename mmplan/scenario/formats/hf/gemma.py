"""Gemma 3n and 4: a table of each block's own beside the tokens' (per-layer embeddings), keys of earlier blocks, and
their audio encoder."""

from dataclasses import replace

from mmplan.scenario.document import shown
from mmplan.scenario.formats.hf.blocks_by_layer import each, full_layers
from mmplan.scenario.formats.hf.conformers import conformer_shape
from mmplan.scenario.formats.hf.ears import audio_module
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.scenario import AudioInput, ModelModule, Transformer
from mmplan.scenario.steps import (
    Active,
    Attend,
    Convolve,
    Dense,
    Fork,
    Form,
    Halve,
    Join,
    Kept,
    Look,
    Mlp,
    Normed,
    Step,
    Steps,
    Usual,
    residual,
)

RMS = Normed(kind="rms")


def form_of_gemma4(text: Fields, shape: Transformer) -> Form | None:
    """The last `num_kv_shared_layers` blocks have no keys of their own, and twice the MLP where the file says so."""
    shared = text.optional("num_kv_shared_layers", least=0) or 0
    width = text.optional("hidden_size_per_layer_input", least=0) or 0
    if shared > shape.layers:
        raise text.error("num_kv_shared_layers", f"{shared} blocks are more than num_hidden_layers = {shape.layers}")
    if not shared and not width:
        return None
    further = per_layer_steps(text, shape, width)
    double = 2 if text.flag("use_double_wide_mlp") else 1
    late: Steps = (residual(RMS, Attend(shared=True), RMS), residual(RMS, Mlp(ffn=double * shape.ffn), RMS), *further)
    if shared and shape.moe is not None:
        raise text.error("num_kv_shared_layers", f"{shared} is not supported beside experts")
    return Form(blocks=((shape.layers - shared, (Usual(), *further)), (shared, late)))


def per_layer_steps(text: Fields, shape: Transformer, width: int, *, table: bool = True) -> Steps:
    """A gate on the block's rows opens what its own table and a projection of the embeddings give of each token. The
    projection is priced on the block's rows, so what plans send between stages lacks the embeddings."""
    if not width:
        return ()
    size = text.optional("vocab_size_per_layer_input") or text.count("vocab_size")
    own: Step = Dense(width=width, bias=False)
    if table:
        own = Fork(left=(own,), right=(Look(size=size, width=width),))
    gate: Steps = (Dense(width=width, bias=False), Active())
    opened = Fork(left=gate, right=(own,), product=True)
    text.log.notes.append(
        "tables of each block: the embeddings that every block reads again are not sent between stages"
    )
    return (residual(opened, Dense(width=shape.hidden, bias=False), RMS),)


def embedding(text: Fields, shape: Transformer) -> Transformer:
    """EmbeddingGemma 2: blocks that see both sides, in windows but for every sixth layer, which has wider heads."""
    often = text.optional("sliding_window_pattern", most=2_000) or 6
    full = {*full_layers(text, shape.layers, often), shape.layers - 1}  # the class makes the last layer a full one
    shape = replace(shape, qk_norm=True, post_norms=True, causal=False)
    window = 2 * text.count("sliding_window", most=100_000_000) + 1
    given = text.get("per_layer_config") is not None  # says all there is to say of single layers
    wide = shape.head_dim if given else text.optional("global_head_dim") or 512
    kv_heads = shape.kv_heads if given else text.optional("num_global_key_value_heads") or 1
    if shape.heads % kv_heads:
        raise text.error("num_global_key_value_heads", f"{shape.heads} heads are not a multiple of {kv_heads}")

    def block(index: int, plain: Transformer) -> Transformer:
        if index in full:
            return replace(plain, head_dim=wide, kv_heads=kv_heads)
        return replace(plain, window_tokens=window)

    return each(shape, block)


def form_of_embedding(text: Fields, shape: Transformer) -> Form:
    """Each block's own rows come of a linear on the embeddings alone."""
    width = text.count("hidden_size_per_layer_input")
    return Form(blocks=((shape.layers, (Usual(), *per_layer_steps(text, shape, width, table=False))),))


def per_layer_norm(text: Fields, shape: Transformer) -> int:
    """One norm of all blocks' tables."""
    del shape
    return text.optional("hidden_size_per_layer_input", least=0) or 0


def gemma3n(text: Fields, shape: Transformer) -> Transformer:
    """Windows but for every fifth block, norms on both sides and on queries and keys, a width of the MLP per block."""
    full = full_layers(text, shape.layers, 5)
    window = text.count("sliding_window", most=100_000_000)
    widths = text.get("intermediate_size")
    if isinstance(widths, list) and (
        len(widths) != shape.layers or not all(isinstance(one, int) and 0 < one <= 1_000_000 for one in widths)
    ):
        raise text.error("intermediate_size", f"expected {shape.layers} widths, found {shown(widths)}")

    def block(index: int, plain: Transformer) -> Transformer:
        plain = replace(plain, qk_norm=True, post_norms=True)
        if isinstance(widths, list):
            plain = replace(plain, ffn=widths[index])
        return plain if index in full else replace(plain, window_tokens=window, sliding=True)

    return each(shape, block)


def form_of_gemma3n(text: Fields, shape: Transformer) -> Form:
    """Four streams (AltUp, arXiv 2301.13310) of which one passes the block, and a low-rank way beside attention
    (LAuReL, 2411.07501). The activations of one stream are counted."""
    hidden, streams = shape.hidden, text.count("altup_num_inputs", most=100)
    shared = text.optional("num_kv_shared_layers", least=0) or 0
    if shared > shape.layers:
        raise text.error("num_kv_shared_layers", f"{shared} blocks are more than num_hidden_layers = {shape.layers}")
    low: Steps = (Dense(width=text.count("laurel_rank"), bias=False), Dense(width=hidden, bias=False), RMS)
    further = per_layer_steps(text, shape, text.count("hidden_size_per_layer_input"))
    scale = hidden if text.get("altup_correct_scale") is not False else 0
    kept = Kept(size=scale + streams**2 + streams**3 + streams * hidden + hidden)
    turned: Steps = tuple(residual(Dense(width=hidden, bias=False)) for _ in range(streams - 1))
    text.log.notes.append(f"AltUp: activations and transfers of one of {streams} streams are counted")

    def block(index: int) -> Steps:
        attend = Fork(left=(Attend(shared=index >= shape.layers - shared), RMS), right=low)
        steps: tuple[Step, ...] = (residual(RMS, attend), residual(RMS, Mlp(), RMS), *further, kept)
        before = turned if index == 0 else ()
        return (*before, *steps, *(turned if index == shape.layers - 1 else ()))

    return Form(blocks=tuple((1, block(index)) for index in range(shape.layers)))


def audio(ear: Fields) -> ModelModule:
    """Conformer blocks with norms on both sides of each branch; attention in chunks with some frames before them."""
    old = ear.kind == "gemma3n_audio"
    before = "conf_" if old else ""
    hidden = ear.count("hidden_size")
    layers, heads, kernel = f"{before}num_hidden_layers", f"{before}num_attention_heads", f"{before}conv_kernel_size"
    shape = conformer_shape(ear, hidden="hidden_size", layers=layers, heads=heads, ffn=4 * hidden, bias=False)
    chunk, left = ear.count(f"{before}attention_chunk_size"), ear.count(f"{before}attention_context_left", least=0)
    right = ear.count(f"{before}attention_context_right", least=0)
    shape = replace(shape, norm="rms", window_tokens=chunk + max(0, left - 1) + right)
    bins = ear.count("input_feat_size") if old else 128
    first, second = ear.numbers("sscp_conv_channel_size" if old else "subsampling_conv_channels", count=2)
    front: Steps = (
        Convolve(width=first, taps=9, bias=False, joins=4),
        Normed(bias=False),
        Active(),
        Convolve(width=second, taps=9, bias=False, joins=4),
        Normed(bias=False),
        Active(),
        Join(rows=max(1, bins // 4)),
        Dense(width=hidden, bias=False),
    )
    convolution: Steps = (
        Dense(width=2 * hidden, bias=False),
        Halve(),
        Convolve(width=hidden, taps=ear.count(kernel, most=10_000), groups=hidden, bias=False),
        RMS,
        Active(function="silu"),
        Dense(width=hidden, bias=False),
    )
    steps: Steps = (
        residual(RMS, Mlp(), RMS),
        residual(RMS, Attend(), RMS),
        residual(RMS, *convolution),
        residual(RMS, Mlp(), RMS),
        RMS,
        Kept(size=hidden * hidden + shape.head_dim),
    )
    form = Form(front=front, raw_width=1, blocks=((shape.layers, steps),))
    reduced = ear.count("conf_reduction_factor", most=100) if old else 1
    sound = AudioInput(mel_bins=bins, pad_s=None, stride=4, pool=reduced)
    return replace(audio_module(shape, sound), form=form)
