"""The doctor on two contrastive towers trained from random weights, without a warm-up: silent where all is well; a
learning rate that jumps and captions that get mixed up are named."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mmplan.runtime.health.diagnosis import Finding, diagnose
from mmplan.runtime.health.hooks import attach
from mmplan.runtime.health.rules import RULES

LATENT, PIXELS, WORDS, WIDTH = 8, 16, 12, 32


class Tower(nn.Module):
    def __init__(self, inputs: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.hidden, self.last = nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.norm = norm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        normed: Tensor = self.norm(x + self.last(functional.gelu(self.hidden(x))))
        return normed


class TwoTowers(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.vision, self.text = Tower(PIXELS, norm), Tower(WORDS, norm)
        self.visual_projection, self.text_projection = (nn.Linear(WIDTH, 24, bias=False) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, pixels: Tensor, words: Tensor) -> dict[str, Tensor]:
        image = functional.normalize(self.visual_projection(self.vision(pixels)), dim=-1)
        text = functional.normalize(self.text_projection(self.text(words)), dim=-1)
        scores, pairs = self.scale.exp() * image @ text.T, torch.arange(len(pixels))
        return {"loss": (functional.cross_entropy(scores, pairs) + functional.cross_entropy(scores.T, pairs)) / 2}


ENDS = {"vision": "visual_projection", "text": "text_projection"}


def findings(
    batch: int,
    rate: float,
    steps: int,
    *,
    norm: Callable[[int], nn.Module] = nn.LayerNorm,
    half: bool = False,
    rate_times: float = 1.0,
    mixed: bool = False,
    broken_at: int = 0,
) -> tuple[Finding, ...]:
    torch.manual_seed(0)
    model, draw = TwoTowers(norm), torch.Generator().manual_seed(10)
    seen = torch.randn(LATENT, PIXELS, generator=draw), torch.randn(LATENT, WORDS, generator=draw)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    with attach(model, branches=ENDS, embeddings=ENDS, interval=4) as health:
        for step in range(steps):
            what = torch.randn(batch, LATENT, generator=draw)
            pixels, words = (what @ view + 0.3 * torch.randn(batch, view.shape[1], generator=draw) for view in seen)
            if broken_at and step >= broken_at:
                optimizer.param_groups[0]["lr"] = rate * rate_times
                words = words[torch.randperm(batch, generator=draw)] if mixed else words
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
                loss = model(pixels, words)["loss"]
            loss.backward()
            optimizer.step()
    return diagnose(health.readings, RULES)


@pytest.mark.parametrize(("batch", "rate"), [(1, 1e-3), (2, 1e-3), (8, 1e-3), (8, 5e-3), (64, 1e-4), (64, 3e-3)])
def test_nothing_is_said_of_towers_that_learn_from_random_weights(batch: int, rate: float) -> None:
    assert findings(batch, rate, 240) == ()


def test_nothing_is_said_of_bf16_towers_with_batchnorm() -> None:
    assert findings(64, 3e-3, 250, norm=nn.BatchNorm1d, half=True) == ()


def test_a_learning_rate_that_jumps_is_told_by_the_loss() -> None:
    found = {one.monitor: one for one in findings(8, 1e-3, 240, rate_times=100, broken_at=200)}
    assert 200 < found["loss"].began <= 225 and "lower the learning rate" in found["loss"].advice


def test_captions_that_get_mixed_up_are_told_by_the_loss_first() -> None:
    first = findings(8, 1e-3, 240, mixed=True, broken_at=200)[0]
    assert first.monitor == "loss" and 200 < first.began <= 225
