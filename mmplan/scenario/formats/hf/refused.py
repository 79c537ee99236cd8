"""Families that are known and not read, each with what stands in the way."""

from collections.abc import Mapping

_CONFORMER = "its audio encoder has convolutions inside its blocks, which have no cost model"
_VQ = "images enter as tokens of a convolutional VQ model, which has no cost model"
_SAM = "its SAM tower (relative positions, a neck of convolutions) has no cost model"
_QFORMER = "its query transformer (learned queries that attend to image tokens) has no cost model"
_CONV = "its tower is a convolutional network, which has no cost model"
_SPARSE = "its attention chooses keys by an index of its own, which has no cost model"
_REMOTE = "its modelling code is no part of transformers"
_SEQ2SEQ = "it is an encoder-decoder text model, whose encoder no projector feeds here"

REFUSED: Mapping[str, str] = {
    "chatglm": _REMOTE,
    "deepseek_v32": _SPARSE,
    "deepseek_v4": _SPARSE,
    "glm_moe_dsa": _SPARSE,
    "internlm2": _REMOTE,
    "kimi_k3": "its modelling code is no part of transformers 5.24 (attention residuals, experts in a latent width), "
    "so nothing confirms its parameters",
    "kimi_linear": "its linear attention has a gate for each column of a key (KDA), which has no cost model yet",
    "minicpmo": _REMOTE,
    "molmo": _REMOTE,
    "ovis": _REMOTE,
    "phi4mm": _CONFORMER,
    "qwen": _REMOTE,
    "ultravox": _REMOTE,
}


def refusal(kind: str) -> str | None:
    """Why a `model_type` is not read, or None where nothing is known against it."""
    return REFUSED.get(kind)
