"""What may stand in place of plain attention in a block: its widths."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Mla:
    """Multi-head latent attention: widths of its projections (names of DeepSeek-V2, arXiv 2405.04434)."""

    q_lora: int | None  # None: queries are projected at once
    kv_lora: int
    qk_nope: int
    qk_rope: int
    v_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDelta:
    """Linear attention by the gated delta rule (arXiv 2412.06464, section 3.3): a state [key_dim, value_dim] per value
    head, one gate and one step size per token and value head; `conv`: kernel of the causal convolutions on queries,
    keys and values. With `gate_rank` each column of a key has a gate of its own, and these gates and that of the output
    pass rows so narrow (Kimi Delta Attention, arXiv 2510.26692)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int
    gate_rank: int = 0
