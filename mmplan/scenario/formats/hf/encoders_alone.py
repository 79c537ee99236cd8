"""Encoders without a language model: CLIP and SigLIP with both towers, or one tower."""

from collections.abc import Mapping

ENCODERS: Mapping[str, object] = {}
