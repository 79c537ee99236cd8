"""Parameters of Hugging Face configs as mmplan reads them and as transformers builds them, on tensors without storage.

    python benchmarks/hf_models.py [--only KIND ...] [FILE ...]

One row per configuration class that mmplan may meet (its defaults; where these do not fit together, also a row with
sizes that do) and per file, and with `--mutate` per key of a class that is changed alone: `equal`, `refused` with the
reason, or the difference. With `--only` the rows of these classes in the CSV are replaced. Towers of timm (Gemma 3n,
FastVLM, Perception LM, EdgeTAM) are compared where it is installed.
`by module`: whether each module of mmplan has the parameters of one or two of the class.
"""

import argparse
import csv
import dataclasses
import json
import logging
import re
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto as autos
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mmplan.cost_models.formats.module_parameters import module_parameters
from mmplan.errors import InputError
from mmplan.scenario.formats.hf.encoders_alone import ENCODERS
from mmplan.scenario.formats.hf.families import FAMILIES
from mmplan.scenario.formats.hf.stacks import STACKS
from mmplan.scenario.formats.hf_config import read_config

FILE = Path(__file__).with_suffix(".csv")
MAPPINGS = [
    autos.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    autos.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    autos.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    autos.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    autos.MODEL_FOR_PRETRAINING_MAPPING_NAMES,
    autos.MODEL_MAPPING_NAMES,
    autos.MODEL_FOR_DECISION_MAPPING_NAMES,
]
# Classes in place of those that the mappings name: with all parts of the family.
WHOLE = {
    "encoder-decoder": "EncoderDecoderModel",
    "glm_image": "GlmImageForConditionalGeneration",
    "moshi": "MoshiForConditionalGeneration",
    "musicgen": "MusicgenForConditionalGeneration",
    "musicgen_melody": "MusicgenMelodyForConditionalGeneration",
    "wav2vec2": "Wav2Vec2Model",
}
# What a family leaves out and says so, by the start of the names of its parameters.
LEFT_OUT = {
    "emu3": r"model\.vqmodel\.(decoder|post_quant_conv)",
    "janus": r"model\.(vqmodel|generation_)",
    "qwen2_5_omni": r"token2wav",
    "qwen3_omni_moe": r"talker|code2wav",
}
# Sizes with which the defaults of a class fit together, or without which the class cannot be built.
FITTED: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"num_attention_heads": 16}},
    "chameleon": {"vocabulary_map": {"<image>": 8711}},
    "colqwen2": {"vlm_config": {"model_type": "qwen2_vl", "vision_config": {"hidden_size": 8192}}},
    "cohere_compass": {
        "vision_config": {"out_hidden_size": 8192},
        "text_config": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    },
    "cosmos3_omni": {"vision_config": {"out_hidden_size": 4096}},
    "deepseek_ocr2": {
        "text_config": {"num_experts_per_tok": 6, "mlp_layer_types": ["dense"] + ["sparse"] * 31},
        "vision_config": {"encoder_config": {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2}},
    },
    "dbrx": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "attn_config": {"rope_theta": 1e4}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "embedding_gemma2": {"audio_config": {}, "vision_config": {}},
    "emu3": {"vocabulary_map": {"<image>": 151851}},
    "exaone4_5": {"vision_config": {"out_hidden_size": 4096}},
    "gemma3": {"mm_tokens_per_image": 49},
    "gemma4": {"audio_config": {}, "vision_config": {}},
    "gemma4_unified": {"audio_config": {}, "vision_config": {}},
    "glm4_moe": {"head_dim": 128},
    "glm4v_moe": {"text_config": {"head_dim": 128}},
    "glm4v_moe_text": {"head_dim": 128},
    "glm5_next": {"vision_config": {"out_hidden_size": 4096}},
    "glm_ocr": {"vision_config": {"out_hidden_size": 1024}},
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0], [4, 3], [8, 6]]},
    "granite_speech": {"projector_config": {"encoder_hidden_size": 1024}},
    "granite_speech_plus": {"projector_config": {"encoder_hidden_size": 1024}},
    "hunyuan_vl": {
        "text_config": {
            "head_dim": 128,
            "rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 1e3, "rope_theta": 1e4},
        }
    },
    "janus": {"vision_config": {"projection_dim": 4096}},
    "llama4": {"vision_config": {"hidden_size": 1408, "vision_output_dim": 4096}},
    "molmo2": {"adapter_config": {"text_hidden_size": 4096}},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "nemotron_h_omni": {"audio_config": {"projection_hidden_size": 4096, "projection_bias": False}},
    "moshi": {"audio_vocab_size": 2048},
    "ovis2": {"hidden_size": 4096},
    "perception_lm": {
        "text_config": {"model_type": "llama"},
        "vision_config": {
            "architecture": "vit_pe_core_large_patch14_336",
            "model_args": {
                "embed_dim": 1024,
                "img_size": [448, 448],
                "depth": 23,
                "global_pool": "",
                "use_post_transformer_norm": False,
                "init_values": 0.1,
                "ref_feat_shape": [32, 32],
            },
        },
        "projector_pooling_ratio": 2,
    },
    "qwen2_5_vl": {"vision_config": {"out_hidden_size": 8192}},
    "qwen2_vl": {"vision_config": {"hidden_size": 8192}},
    "qwen3_5": {"vision_config": {"out_hidden_size": 4096}},
    "qwen3_5_moe": {"vision_config": {"out_hidden_size": 2048}},
    "qwen3_asr": {"audio_config": {"output_dim": 2048}},
    "qwen3_omni_moe_thinker": {
        "text_config": {"num_attention_heads": 32},
        "audio_config": {"output_dim": 2048},
        "vision_config": {"out_hidden_size": 2048},
    },
    "qwen4_exp": {
        "vision_config": {"out_hidden_size": 2048},
        "text_config": {
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 256,
            "indexer_budget": 2048,
            "indexer_compress_ratio": 16,
            "ple_layer_ids": [2, 30],
            "ngram_vocab_size_base": 20_000,
            "eos_token_id": 1,
        },
    },
    "qwen3_vl": {"vision_config": {"out_hidden_size": 4096}},
    "qwen3_vl_moe": {"vision_config": {"out_hidden_size": 2048}},
    "t5gemma2": {"encoder": {"mm_tokens_per_image": 49}},
    "shieldgemma2": {"mm_tokens_per_image": 49},
}
REPVIT = {
    "backbone_channel_list": [384, 192, 96, 48],
    "backbone_config": {
        "model_type": "timm_wrapper",
        "architecture": "repvit_m1",
        "num_classes": 10,
        "model_args": {"in_chans": 3, "features_only": True, "out_indices": [0, 1, 2, 3]},
    },
}
FITTED |= {
    "edgetam": {"vision_config": REPVIT},
    "edgetam_video": {"vision_config": REPVIT},
    "edgetam_vision_model": REPVIT,
    "qwen4_exp_text": FITTED["qwen4_exp"]["text_config"],
}
LOOK = re.compile(r"vision|visual|image|audio|speech|projector|merger|aligner|connector|qformer|encoder")
TIMEOUT_S = 120


def built_by_transformers(values: dict[str, Any]) -> tuple[str, dict[str, int]]:
    """Class, and the parameters of each name."""
    kind = values["model_type"]
    config = transformers.AutoConfig.for_model(**values)
    names = WHOLE.get(kind) or next((mapping[kind] for mapping in MAPPINGS if kind in mapping), None)
    names = [names] if isinstance(names, str) else list(names or ())
    if not names:
        raise ValueError("no model class")
    with torch.device("meta"):
        model = getattr(transformers, names[0])(config)
    left_out = re.compile(LEFT_OUT.get(kind, "^$"))
    return names[0], {name: p.numel() for name, p in model.named_parameters() if not left_out.match(name)}


def unlike(modules: dict[str, int], parameters: dict[str, int]) -> list[str]:
    """Modules of mmplan whose count no module of the class has, nor two together, nor one without a part of it.

    Numbers of some millions hardly ever agree by chance.
    """
    nodes: Counter[str] = Counter()
    for name, count in parameters.items():
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            nodes[".".join(parts[:depth])] += count
    # of long lists of equal blocks only the list counts
    small = {path: count for path, count in nodes.items() if not re.search(r"\.\d{2,}|layers?\.\d|blocks\.\d", path)}
    sums = set(small.values())
    for path, count in small.items():
        inside = [(other, inner) for other, inner in small.items() if other.startswith(path) and other != path]
        sums |= {count - inner for _, inner in inside}
        children = [inner for other, inner in inside if other.count(".") == path.count(".") + 1]
        sums |= {count - one - two for one, two in combinations(children[:40], 2)}
    found = []
    parts = {name: count for name, count in modules.items() if re.match(r"(vision|audio)(?!.*project)", name)}
    towers = Counter[str]()
    for name, count in parts.items():  # a tower's resolutions together
        towers["vision" if name.startswith("vision") else "audio"] += count
    modules = {name: count for name, count in modules.items() if name not in parts} | dict(towers)
    for module, count in modules.items():
        if count not in sums and not any(count - one in sums for one in small.values()):
            found.append(module)
    return found


def read_by_us(values: dict[str, Any]) -> dict[str, int]:
    """Parameters of each module."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(values))
        try:
            return module_parameters(read_config(file).model)
        except InputError as error:
            raise InputError(str(error).replace(f"{file}: ", "")) from None


def compared(case: str, values: dict[str, Any]) -> dict[str, Any]:
    modules: dict[str, int] = {}
    row: dict[str, Any] = {"case": case, "model_type": values.get("model_type"), "class": "", "transformers": ""}
    row |= {"mmplan": "", "result": "", "by module": "", "modules": ""}
    parameters: dict[str, int] = {}
    try:
        modules = read_by_us(values)
        row["mmplan"] = sum(modules.values())
        row["modules"] = " ".join(f"{name}={count}" for name, count in modules.items())
    except InputError as error:
        row["result"] = f"refused: {error}"
    try:
        signal.alarm(TIMEOUT_S)
        row["class"], parameters = built_by_transformers(values)
        row["transformers"] = sum(parameters.values())
    except Exception as error:
        said = str(error).replace("\n", " ")[:120]
        row["result"] = row["result"] or f"transformers cannot build it: {type(error).__name__}: {said}"
    finally:
        signal.alarm(0)
    if not row["result"]:
        difference = row["mmplan"] - row["transformers"]
        row["result"] = "equal" if difference == 0 else f"differs by {difference:+,}"
        row["by module"] = " ".join(unlike(modules, parameters)) or "equal"
    return row


def classes() -> list[str]:
    """Classes with several parts, and those that mmplan reads."""
    several = [kind for kind, config in CONFIG_MAPPING.items() if getattr(config, "sub_configs", None)]
    return sorted({*several, *FAMILIES, *STACKS, *ENCODERS} & set(CONFIG_MAPPING))


def mutated(kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The class's defaults with one key of it or of a nested config changed."""
    whole = CONFIG_MAPPING[kind]()
    parts = {"": whole}
    parts |= {name: inner for name in getattr(whole, "sub_configs", {}) or {} if (inner := getattr(whole, name, None))}
    for part, config in parts.items():
        for field in dataclasses.fields(config):
            value = field.default
            if field.name in {"return_dict", "output_hidden_states", "is_encoder_decoder", "use_cache"}:
                continue
            if isinstance(value, bool):
                others: list[Any] = [not value]
            elif isinstance(value, int) and value > 0 and not field.name.endswith(("_id", "_index")):
                others = [value * 2, max(1, value // 2)]
            elif value is None and field.name in {"head_dim", "num_key_value_heads", "q_lora_rank", "sliding_window"}:
                others = [64 if field.name == "head_dim" else 8]
            else:
                continue
            for other in others:
                inner = {field.name: other}
                if part:
                    inner = {part: {"model_type": config.model_type, **_sizes(config), **inner}}
                yield f"{kind} {part}.{field.name}={other}", {"model_type": kind, **inner}


def _sizes(config: Any) -> dict[str, Any]:
    """A nested config as it is when its key is absent."""
    usual = type(config)()
    names = [field.name for field in dataclasses.fields(config)]
    differing = {name: getattr(config, name) for name in names if getattr(config, name) != getattr(usual, name)}
    return {name: value for name, value in differing.items() if isinstance(value, int | float | list | str)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--mutate", action="store_true")
    parser.add_argument("files", nargs="*", type=Path)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    signal.signal(signal.SIGALRM, _late)
    cases = [(file.name, json.loads(file.read_text())) for file in given.files]
    if not given.files:
        kinds = given.only or classes()
        for kind in kinds:
            cases.append((kind, {"model_type": kind}))
            if kind in FITTED:
                cases.append((f"{kind} (fitted)", {"model_type": kind, **FITTED[kind]}))
            if given.mutate:
                try:
                    cases += list(mutated(kind))
                except Exception as error:
                    print(kind, "cannot be changed:", error)
    rows = []
    for case, values in cases:
        row = compared(case, values)
        rows.append(row)
        if given.mutate and (row["result"] == "equal" or row["result"].startswith("transformers cannot")):
            continue
        if given.mutate and row["result"].startswith("refused") and row["transformers"] == "":
            continue
        print(f"{case}: {row['mmplan']} {row['transformers']} {row['result'][:200]} {row['by module']}", flush=True)
    if not given.mutate and not given.files:
        if given.only:
            rows = _replaced(rows, set(kinds))
        with FILE.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def _replaced(rows: list[dict[str, Any]], kinds: set[str]) -> list[dict[str, Any]]:
    """Rows of the CSV with those of some classes as they are now, in the order of classes."""
    with FILE.open(newline="") as file:
        kept = [row for row in csv.DictReader(file) if row["model_type"] not in kinds]
    return sorted([*kept, *rows], key=lambda row: (row["model_type"], row["case"]))


def _late(*_: Any) -> None:
    raise TimeoutError(f"not built within {TIMEOUT_S} s")


if __name__ == "__main__":
    main()
