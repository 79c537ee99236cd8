"""Language models without encoders."""

from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.scenario import Model

PLAIN = (
    "deepseek_v3",
    "gemma3_text",
    "kimi_k2",
    "llama",
    "llama4_text",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)


def plain(config: Fields, name: str) -> Model:
    """One language model."""
    return Model(name=name, modules=(text_module(config, str(config.get("model_type"))),), edges=())
