"""Families that are known and not read, each with what stands in the way."""

from collections.abc import Mapping

_LINEAR = "most of its layers are linear attention (gated delta rule), which has no cost model yet"

REFUSED: Mapping[str, str] = {
    "deepseek_vl_v2": "its towers (SAM beside CLIP, or tiles with learned separators) have no counterpart here",
    "kimi_k3": _LINEAR,
    "kimi_linear": _LINEAR,
    "whisper": "its decoder layers hold self-attention and cross-attention, not one of the two",
}
