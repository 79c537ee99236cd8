"""Families that are known and not read, each with what stands in the way."""

from collections.abc import Mapping

_LINEAR = "most of its layers are linear attention (gated delta rule), which has no cost model yet"

REFUSED: Mapping[str, str] = {
    "clip": "its contrastive loss spans the whole global batch, so microbatches cannot be computed one by one",
    "deepseek_vl_v2": "its towers (SAM beside CLIP, or tiles with learned separators) have no counterpart here",
    "gemma4": "its blocks hold a dense MLP beside the experts, and full layers use keys as values",
    "kimi_k3": _LINEAR,
    "kimi_linear": _LINEAR,
    "qwen3_5": _LINEAR,
    "qwen3_5_moe": _LINEAR,
    "qwen3_omni_moe": "its talker predicts several codes of a frame with a model of its own",
    "siglip": "its contrastive loss spans the whole global batch, so microbatches cannot be computed one by one",
    "step3p7": "its attention has a gate for each head, and head counts differ between layers",
    "whisper": "its decoder layers hold self-attention and cross-attention, not one of the two",
}
