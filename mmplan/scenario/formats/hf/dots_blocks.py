"""Blocks of Dots 3 Note's language model: latent attention of two kinds, with windows or with an index that chooses
keys, and a gate for each head."""

from dataclasses import replace

from mmplan.scenario.attention_forms import Mla
from mmplan.scenario.document import shown
from mmplan.scenario.formats.hf.blocks_by_layer import each, kinds_of_layers
from mmplan.scenario.formats.hf.experts import latent_attention, moe_of, sparse_layers
from mmplan.scenario.formats.hf.indexed import index_steps
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.scenario import Moe, Transformer
from mmplan.scenario.steps import Attend, Experts, Form, Mlp, Normed, Step, Steps, residual

INDEXED, FULL, NEAR = "indexed_attention", "full_attention", "sliding_attention"
# Sizes of layers with windows (configuration_dots3_note.py of transformers 5.24).
NEAR_SIZES = {"num_attention_heads": 64, "q_lora_rank": 1024, "kv_lora_rank": 1024, "head_dim": 256}
NEAR_SIZES |= {"qk_nope_head_dim": 192, "v_head_dim": 128}
RMS = Normed(kind="rms")


def as_now(text: Fields) -> Fields:
    """`per_layer_config`, which files of the class have, as the keys `swa_...` of released ones."""
    given = text.values.get("per_layer_config")
    if given is None:
        return text
    entries = list(given.values()) if isinstance(given, dict) else []
    if not entries or not all(isinstance(entry, dict) and entry == entries[0] for entry in entries):
        message = f"expected the same sizes for all layers with windows, found {shown(given)}"
        raise text.error("per_layer_config", message)
    near = {f"swa_{key}": value for key, value in entries[0].items()}
    values = {**text.values, "use_dsa": text.values.get("use_dsa"), **near, "per_layer_config": None}
    return replace(text, values=values)


def _kinds(text: Fields, layers: int) -> list[str]:
    given = "use_dsa" in text.values
    chooses = text.values["use_dsa"] if given else True
    near = text.values.get("use_sliding_window") is not False
    usual = FULL if chooses is False else INDEXED
    words = kinds_of_layers(
        text, layers, (INDEXED, FULL, NEAR), lambda i: NEAR if near and i >= 2 and i % 4 != 1 else usual
    )
    return words if chooses is None else [word if word == NEAR else usual for word in words]


def stack(text: Fields, shape: Transformer) -> Transformer:
    """A gate for each head; attention with an index is priced over as many keys as it chooses."""
    kinds = _kinds(text, shape.layers)
    wide = replace(latent_attention(text, shape), out_gate="head", stored=text.count("qk_rope_head_dim"))
    usual = {f"swa_{key}": value for key, value in NEAR_SIZES.items()}
    other = replace(text, defaults={**text.defaults, **usual})
    heads, nope = other.count("swa_num_attention_heads"), other.count("swa_qk_nope_head_dim")
    rope = other.optional("swa_qk_rope_head_dim") or other.count("swa_head_dim") - nope
    if rope < 2 or rope % 2:
        raise text.error("swa_head_dim", f"rotary positions need an even width, found {rope}")
    mla = Mla(
        q_lora=other.count("swa_q_lora_rank"),
        kv_lora=other.count("swa_kv_lora_rank"),
        qk_nope=nope,
        qk_rope=rope,
        v_dim=other.count("swa_v_head_dim"),
    )
    window = text.optional("sliding_window", most=100_000_000) or text.optional("sliding_window_size") or 512
    chosen = text.count("index_topk", most=100_000_000)
    near = replace(wide, heads=heads, kv_heads=heads, mla=mla, window_tokens=window, sliding=True, stored=rope)
    plain = {NEAR: near, FULL: wide, INDEXED: replace(wide, window_tokens=chosen, sliding=True)}
    moe, sparse = _experts(text), _sparse(text, shape.layers)
    return each(shape, lambda index, _: replace(plain[kinds[index]], moe=moe if index in sparse else None))


def _experts(text: Fields) -> Moe:
    width = text.count("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size")
    moe = moe_of(text, "n_routed_experts", text.count("moe_intermediate_size"), scoring="sigmoid")
    return replace(moe, shared_ffn=width * text.count("n_shared_experts", most=1_000))


def _sparse(text: Fields, layers: int) -> list[int]:
    """Which layers have experts: `mlp_layer_types`, or the released files' first dense layers."""
    first = text.optional("first_k_dense_replace", least=0, most=1_000_000)
    often = text.values.get("moe_layer_freq", 1)
    if text.get("mlp_layer_types") is not None or often == 1:
        return sparse_layers(text, layers, first=1 if first is None else first)
    if not isinstance(often, list) or len(often) != layers:
        raise text.error("moe_layer_freq", f"expected 1 or {layers} zeros and ones, found {shown(often)}")
    return [index for index, one in enumerate(often) if one and index >= (1 if first is None else first)]


def form(text: Fields, shape: Transformer) -> Form:
    kinds, index = _kinds(text, shape.layers), index_steps(text, shape, pool=1)
    blocks: list[tuple[int, Steps]] = []
    for layer, kind in enumerate(kinds):
        block = shape.at(layer)
        body: Step = Experts() if block.moe is not None else Mlp()
        attention = residual(RMS, *(index if kind == INDEXED else ()), Attend())
        blocks.append((1, (attention, residual(RMS, body))))
    return Form(blocks=tuple(blocks))
