"""Parameters of a model as mmplan reads it and as transformers builds it, on tensors without storage."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import parameters
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Model

ROOT = Path(__file__).parents[2]


def parameter_count(model: Model) -> int:
    scenario = load_scenario(ROOT / "scenarios" / "tiny.yaml")
    return sum(parameters(layer) for layer in build_graph(replace(scenario, model=model)).layers())


def parameters_on_meta(file: Path) -> int:
    return sum(meta_parameters(file).values())


def meta_parameters(file: Path) -> dict[str, int]:
    """Name -> numbers of each parameter, of several models one after the other."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    values = json.loads(file.read_text())
    kind = values.pop("model_type")
    with torch.device("meta"):
        if kind == "qwen2_5_omni":
            config = transformers.Qwen2_5OmniConfig(**values)
            built = [transformers.Qwen2_5OmniThinkerForConditionalGeneration(config.thinker_config)]
            if values.get("enable_audio_output", True):
                built += [transformers.Qwen2_5OmniTalkerForConditionalGeneration(config.talker_config)]
        elif kind == "qwen3_omni_moe":
            thinker = transformers.Qwen3OmniMoeConfig(**values).thinker_config
            built = [transformers.Qwen3OmniMoeThinkerForConditionalGeneration(thinker)]
        else:
            autos = transformers.models.auto.modeling_auto
            mappings = [autos.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, autos.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES]
            mappings += [autos.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
            mappings += [autos.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, autos.MODEL_MAPPING_NAMES]
            config = transformers.AutoConfig.for_model(kind, **values)
            names = next(mapping[kind] for mapping in mappings if kind in mapping)
            built = [getattr(transformers, names if isinstance(names, str) else names[0])(config)]
    single = len(built) == 1
    named = ((f"{'' if single else index}", *pair) for index, m in enumerate(built) for pair in m.named_parameters())
    return {f"{prefix}{name}": parameter.numel() for prefix, name, parameter in named}
