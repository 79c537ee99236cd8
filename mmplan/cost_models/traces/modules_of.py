"""Which part of a multimodal model a range of a trace belongs to, by the words of its name.

Names come from the modules themselves (`nn.Module: SiglipVisionModel_0`, with the profiler's `with_stack=True` and
`with_modules=True`) or from ranges that people set (NVTX, `record_function("vision_tower")`).
"""

import re

MODULE = "nn.Module: "  # how the profiler begins the names of modules
VISION, AUDIO, TEXT, PROJECTOR = "vision", "audio", "text", "projector"

_WORDS = {
    PROJECTOR: "projector merger connector resampler qformer mmprojector multimodalprojector",
    TEXT: "text language llm lm",
    VISION: "vision visual vit siglip siglip2 clip image eva dino dinov2 intern_vit internvit sam pixtral video",
    AUDIO: "audio whisper speech wav2vec hubert sound usm conformer",
}
_PART_OF = {word: part for part, words in _WORDS.items() for word in words.split()}
# Work around the model (`clip_grad_norm`, `image_loss`), and models that hold all parts.
_NONE = {
    "step",
    "loss",
    "grad",
    "gradient",
    "gradients",
    "optimizer",
    "dataloader",
    "loader",
    "data",
    "load",
    "augment",
}
_WHOLE = {"vl", "vlm", "omni", "multimodal", "conditional", "generation"}
_BACKBONES = re.compile(
    r"^(llama|qwen|qwen2|qwen3|mistral|mixtral|gemma|gemma2|gemma3|phi|phi3|vicuna|opt|gpt|gpt2|bloom|deepseek|glm|olmo)$"
)
_PIECES = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+\d*|[A-Z]+\d*|\d+")
_MOST_NAME = 200


def part_of(name: str) -> tuple[str, bool] | None:
    """(`vision`, `audio`, `text` or `projector`, whether its words say so), None where it is none of these.

    A text model of CLIP is text, a multimodal projector a projector. `Gemma3Model` is called like a language model, and
    may hold a vision tower: its name does not say so.
    """
    words = [piece.lower() for piece in _PIECES.findall(name[:_MOST_NAME].removeprefix(MODULE))]
    if _NONE & set(words):
        return None
    found = {_PART_OF[word] for word in words if word in _PART_OF}
    for part in (PROJECTOR, TEXT, AUDIO, VISION):  # the more special word wins
        if part in found:
            return part, True
    if words and not _WHOLE & set(words) and _BACKBONES.match(words[0]) and {"model", "causal"} & set(words):
        return TEXT, False
    return None
