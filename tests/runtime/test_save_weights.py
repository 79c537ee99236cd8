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
from torch import Tensor, nn
from torch.nn import Parameter

from mmplan.runtime.ghost.model import saved_buffers
from mmplan.runtime.ghost.pretrained import Pretrained
from mmplan.runtime.ghost.save_weights import _converted, _weights
from mmplan.runtime.held import Buffer, Place, whole_place

FAMILIES = (
    *(ghost_models.llava, ghost_models.qwen2_vl, ghost_models.qwen2_5_vl, ghost_models.qwen3_vl),
    *(ghost_models.qwen3_vl_moe, ghost_models.qwen2_audio, ghost_models.mllama, ghost_models.gemma3),
    ghost_models.whisper,
)


class Stage:
    """The parameters of every second block, as a stage has them."""

    def __init__(self, model: nn.Module, index: int) -> None:
        self.state, self.places = self, dict[Parameter, Place]()
        for name, parameter in model.named_parameters():
            block = re.search(r"\.(\d+)\.", name)
            if (int(block[1]) % 2 if block else 0) == index:
                self.places[parameter] = whole_place(name, parameter)
        self.buffers = [
            Buffer(name=name, tensor=tensor, writes=index == 1) for name, tensor in saved_buffers(model).items()
        ]

    def weights(self) -> list[Parameter]:
        return list(self.places)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_stages_together_save_what_the_library_saves(family: Callable[[], Case], tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = family()[0]()
    model.register_buffer("kept", torch.rand(3))
    saved: dict[str, Tensor] = {}
    for index in (0, 1):
        saved |= _converted(model, _weights(model, [Stage(model, index)], None, writes=True))  # type: ignore[list-item]
    model.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    expected = load_file(file)
    assert saved.keys() == expected.keys() > {"kept"}
    assert all(saved[name].equal(value) for name, value in expected.items())


def test_what_a_model_keeps_beside_its_parameters_is_read_with_them(tmp_path: Path) -> None:
    model = ghost_models.llava()[0]()
    model.register_buffer("kept", torch.rand(3))
    model.save_pretrained(tmp_path)
    pretrained = Pretrained(tmp_path, model)
    found = pretrained.buffer("kept")
    assert found is not None and found.equal(model.get_buffer("kept"))
    assert pretrained.buffer("absent") is None
