"""JSON files that lie beside a config.json and are none: what each is."""

from collections.abc import Mapping
from typing import Any

# The first row of which all keys stand in a file says what it is; surest marks first.
_MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("_diffusers_version",), "a file of diffusers (model_index.json or a component's config.json)"),
    (("peft_type",), "the adapter_config.json of PEFT"),
    (("weight_map",), "the index of a sharded checkpoint"),
    (("zero_optimization",), "DeepSpeed's JSON settings"),
    (("train_micro_batch_size_per_gpu",), "DeepSpeed's JSON settings"),
    (("train_batch_size",), "DeepSpeed's JSON settings"),
    (("added_tokens_decoder",), "a tokenizer_config.json"),
    (("tokenizer_class",), "a tokenizer_config.json"),
    (("added_tokens", "model"), "a tokenizer.json"),
    (("image_processor_type",), "a preprocessor_config.json"),
    (("feature_extractor_type",), "a preprocessor_config.json"),
    (("processor_class",), "a processor_config.json or preprocessor_config.json"),
    (("image_mean", "image_std"), "a preprocessor_config.json"),
    (("chat_template",), "a chat template"),
    (("log_history",), "the trainer_state.json of a Trainer"),
    (("_from_model_config",), "a generation_config.json"),
    (("dim", "n_layers"), "the params.json of Meta's or Mistral's own format"),
    (("traceEvents",), "a profiler's trace"),
)
_GENERATION = {"do_sample", "temperature", "top_p", "top_k", "max_new_tokens", "num_beams", "repetition_penalty"}
_GENERATION |= {"bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "max_length"}


def look_alike(values: Mapping[str, Any]) -> str | None:
    """What a JSON object without `model_type` is, or None where that is not known."""
    if not values:
        return "an empty object"
    for keys, what in _MARKS:
        if all(key in values for key in keys):
            return what
    if set(values) <= _GENERATION:
        return "a generation_config.json"
    if all(isinstance(value, int) for value in values.values()) and len(values) > 20:
        return "a vocabulary"
    return None
