"""Weights of models of transformers, saved stage by stage, against what the library itself saves."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers.core_model_loading")

import ghost_models
from ghost_models import Case
from safetensors.torch import load_file
from torch import nn
from torch.nn import Parameter

from mmplan.runtime.ghost.save_weights import _buffers, _converted, _weights
from mmplan.runtime.held import Place, whole_place

FAMILIES = (
    *(ghost_models.llava, ghost_models.qwen2_vl, ghost_models.qwen2_5_vl, ghost_models.qwen3_vl),
    *(ghost_models.qwen3_vl_moe, ghost_models.qwen2_audio, ghost_models.mllama, ghost_models.gemma3),
    ghost_models.whisper,
)


class Stage:
    """The parameters of every second block, as a stage has them."""

    def __init__(self, model: nn.Module, index: int) -> None:
        self.places: dict[Parameter, Place] = {}
        for name, parameter in model.named_parameters():
            block = re.search(r"\.(\d+)\.", name)
            if (int(block[1]) % 2 if block else 0) == index:
                self.places[parameter] = whole_place(name, parameter)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_stages_together_save_what_the_library_saves(family: Callable[[], Case], tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = family()[0]()
    saved = _buffers(model)
    for index in (0, 1):
        saved |= _converted(model, _weights(model, [Stage(model, index)]))  # type: ignore[list-item]
    model.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    expected = load_file(file)
    assert saved.keys() == expected.keys()
    assert all(saved[name].equal(value) for name, value in expected.items())
