"""Parameters of Hugging Face configs as mmplan reads them and as transformers builds them, on tensors without storage.

    python benchmarks/hf_models.py [--only KIND ...] [FILE ...]

One row per configuration class that mmplan may meet (its defaults) and per file, and with `--mutate` per key of a class
that is changed alone: `equal`, `refused` with the reason, or the difference.
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
from collections.abc import Iterator
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
from mmplan.scenario.formats.hf.text import STACKS
from mmplan.scenario.formats.hf_config import read_config

FILE = Path(__file__).with_suffix(".csv")
MAPPINGS = [
    autos.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    autos.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    autos.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    autos.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    autos.MODEL_FOR_PRETRAINING_MAPPING_NAMES,
    autos.MODEL_MAPPING_NAMES,
]
# What a family leaves out and says so, by the start of the names of its parameters.
LEFT_OUT = {
    "emu3": r"model\.vqmodel\.(decoder|post_quant_conv)",
    "janus": r"model\.(vqmodel|generation_)",
    "qwen2_5_omni": r"token2wav",
    "qwen3_omni_moe": r"talker|code2wav",
}
LOOK = re.compile(r"vision|visual|image|audio|speech|projector|merger|aligner|connector|qformer|encoder")
TIMEOUT_S = 120


def built_by_transformers(values: dict[str, Any]) -> tuple[str, int]:
    """Class and parameters."""
    kind = values["model_type"]
    config = transformers.AutoConfig.for_model(**values)
    names = next((mapping[kind] for mapping in MAPPINGS if kind in mapping), None)
    names = [names] if isinstance(names, str) else list(names or ())
    if not names:
        raise ValueError("no model class")
    with torch.device("meta"):
        model = getattr(transformers, names[0])(config)
    left_out = re.compile(LEFT_OUT.get(kind, "^$"))
    return names[0], sum(p.numel() for name, p in model.named_parameters() if not left_out.match(name))


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
    row: dict[str, Any] = {"case": case, "model_type": values.get("model_type"), "class": "", "transformers": ""}
    row |= {"mmplan": "", "result": "", "modules": ""}
    try:
        modules = read_by_us(values)
        row["mmplan"] = sum(modules.values())
        row["modules"] = " ".join(f"{name}={count}" for name, count in modules.items())
    except InputError as error:
        row["result"] = f"refused: {error}"
    try:
        signal.alarm(TIMEOUT_S)
        row["class"], row["transformers"] = built_by_transformers(values)
    except Exception as error:
        said = str(error).replace("\n", " ")[:120]
        row["result"] = row["result"] or f"transformers cannot build it: {type(error).__name__}: {said}"
    finally:
        signal.alarm(0)
    if not row["result"]:
        difference = row["mmplan"] - row["transformers"]
        row["result"] = "equal" if difference == 0 else f"differs by {difference:+,}"
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
        print(f"{case}: {row['mmplan']} {row['transformers']} {row['result'][:200]}", flush=True)
    if not given.only and not given.mutate and not given.files:
        with FILE.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def _late(*_: Any) -> None:
    raise TimeoutError(f"not built within {TIMEOUT_S} s")


if __name__ == "__main__":
    main()
