"""Dimensions of a language model in the words of Megatron-LM's command line (names of its release 0.19).

What these words cannot say is refused: a run would train another model than the one that was planned.
"""

from collections.abc import Iterator
from itertools import groupby

from mmplan.errors import CheckError
from mmplan.scenario.attention_forms import Mla
from mmplan.scenario.scenario import ModelModule, Moe, Transformer

Words = tuple[str, ...]


def model_words(module: ModelModule, tp: int, target: str) -> Words:
    """Arguments that build the module's blocks, norms, experts and vocabulary.

    Raises:
        CheckError: names what the arguments have no word for.
    """
    shape, vocabulary = module.transformer, module.vocabulary
    if shape is None or vocabulary is None:
        raise CheckError(f"{target}: {module.name} has no transformer blocks with a vocabulary")
    for lacking in _unsaid(shape, tp):
        raise CheckError(f"{target}'s arguments have no word for {lacking} of {module.name}")
    table = () if vocabulary.tied else ("--untie-embeddings-and-output-weights",)
    return (
        *_words(
            ("--num-layers", shape.layers),
            ("--hidden-size", shape.hidden),
            ("--ffn-hidden-size", shape.ffn),
            ("--num-attention-heads", shape.heads),
        ),
        *_attention(shape),
        *_words(("--normalization", "RMSNorm" if shape.norm == "rms" else "LayerNorm")),
        *(("--swiglu",) if shape.gated_mlp else ()),
        *(() if shape.out_bias or shape.mlp_bias else ("--disable-bias-linear",)),
        *(("--add-qkv-bias",) if shape.qkv_bias else ()),
        *(() if shape.moe is None else _experts(shape.moe, shape.layers)),
        *_words(
            ("--position-embedding-type", "rope"),
            ("--vocab-size", vocabulary.size),
            ("--make-vocab-size-divisible-by", vocabulary.pad_to),
        ),
        *table,
    )


def _words(*pairs: tuple[str, object]) -> Words:
    return tuple(str(word) for pair in pairs for word in pair)


def _unsaid(shape: Transformer, tp: int) -> Iterator[str]:
    """What the arguments cannot describe; `stored` numbers are small and need no words."""
    if shape.moe is not None and shape.moe.router_bias and not shape.moe.scoring.startswith("sigmoid"):
        yield "the bias of a softmax router"
    if shape.variants:
        yield "the unlike blocks"
    if shape.delta is not None:
        yield "the linear attention"
    if shape.cross_layers:
        yield "the cross-attention"
    if not shape.causal:
        yield "attention that is not causal"
    if shape.gated_mlp and shape.mlp_activation != "silu":
        yield "the gated MLP with gelu"
    if not shape.gated_mlp and shape.mlp_activation != "gelu":
        yield "the MLP with silu and no gate"
    if shape.out_bias != shape.mlp_bias:
        yield "biases in only one of attention output and MLP"
    if (shape.out_bias or shape.mlp_bias) and not shape.qkv_bias:
        yield "biases of linears without those of the queries"
    if shape.qkv_bias and not shape.key_bias:
        yield "query and value biases without key biases"
    if shape.post_norms or not shape.pre_norms:
        yield "the norms behind attention and MLP"
    for what, present in (
        ("query and key norms over all heads", shape.qk_norm_whole),
        ("attention and MLP side by side", shape.parallel),
        ("keys that are values", shape.keys_as_values),
        ("short convolutions", shape.short_conv > 0),
        ("a gate for each head", shape.out_gate == "head"),
        ("layer scales", shape.layer_scale),
        ("a norm before the first block", shape.norm_first_extra),
        ("a norm without shift", shape.norm == "layer" and not shape.norm_bias),
        ("no norm after the last block", not shape.final_norm),
        ("heads that are padded to tp", shape.heads % tp > 0 or (shape.mla is None and shape.kv_heads % tp > 0)),
    ):
        if present:
            yield what


def _attention(shape: Transformer) -> Words:
    if shape.mla is not None:
        return (*_latent(shape.mla), "--qk-layernorm")  # norms on the narrow queries, keys and values
    words: Words = _words(("--kv-channels", shape.head_dim))
    if shape.kv_heads != shape.heads:
        words = ("--group-query-attention", *_words(("--num-query-groups", shape.kv_heads)), *words)
    words += ("--qk-layernorm",) if shape.qk_norm else ()
    words += ("--attention-output-gate",) if shape.out_gate else ()
    return words + _windows(shape)


def _latent(mla: Mla) -> Words:
    lora = () if mla.q_lora is None else _words(("--q-lora-rank", mla.q_lora))
    return (
        "--multi-latent-attention",
        *lora,
        *_words(
            ("--kv-lora-rank", mla.kv_lora),
            ("--qk-head-dim", mla.qk_nope),
            ("--qk-pos-emb-head-dim", mla.qk_rope),
            ("--v-head-dim", mla.v_dim),
            ("--kv-channels", mla.v_dim),
        ),
    )


def _windows(shape: Transformer) -> Words:
    """Sliding windows look back only; blocks with full attention have a 0 in the pattern."""
    if shape.window_tokens is None:
        return ()
    words = _words(("--window-size", f"{shape.window_tokens - 1},0"))
    if not shape.global_layers:
        return words
    sliding = (int(index not in shape.global_layers) for index in range(shape.layers))
    return (*words, "--window-attn-skip-freq", pattern(sliding))


def _experts(moe: Moe, layers: int) -> Words:
    words = _words(
        ("--num-experts", moe.experts),
        ("--moe-router-topk", moe.topk),
        ("--moe-ffn-hidden-size", moe.expert_ffn),
        ("--moe-layer-freq", pattern(int(moe.in_layer(index)) for index in range(layers))),
        ("--moe-router-score-function", "sigmoid" if moe.scoring.startswith("sigmoid") else "softmax"),
    )
    words += ("--moe-router-pre-softmax",) if moe.scoring == "softmax_all" else ()
    words += ("--moe-router-enable-expert-bias",) if moe.router_bias else ()
    words += _words(("--moe-shared-expert-intermediate-size", moe.shared_ffn)) if moe.shared_ffn else ()
    words += () if moe.capacity_factor is None else _words(("--moe-expert-capacity-factor", moe.capacity_factor))
    return (*words, "--moe-grouped-gemm", "--moe-token-dispatcher-type", "alltoall")


def pattern(values: Iterator[int]) -> str:
    """Numbers as the list expression that Megatron evaluates.

    >>> pattern(iter([0, 1, 1]))
    '([0]*1+[1]*2)'
    """
    return f"({'+'.join(f'[{value}]*{len(list(run))}' for value, run in groupby(values))})"
