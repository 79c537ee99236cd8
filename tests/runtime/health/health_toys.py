"""A small image-caption model that trains in a second, healthy or with one planted fault, watched by its hooks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmplan.runtime.health.hooks import attach

PATCHES, CLASSES, WIDTH, HEADS, BATCH = 8, 10, 32, 4, 32


class HalfLinear(nn.Linear):
    """Computes in fp16."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.half(), self.weight.half(), self.bias.half()).to(x.dtype)


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(12, WIDTH)
        self.place = nn.Parameter(torch.randn(PATCHES, WIDTH))
        self.block = HalfLinear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch(pixels) + self.place
        return self.norm(x + functional.gelu(self.block(x)))


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES + 1, WIDTH)
        self.place = nn.Parameter(torch.randn(PATCHES, WIDTH))
        self.block = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.place
        return self.norm(x + functional.gelu(self.block(x)))


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)  # all heads, or a rank's
            for layer, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, key))
        )
        weights = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1)
        return (weights @ v).transpose(1, 2).flatten(2), weights


class Toy(nn.Module):
    """Says the class of each patch; image and caption embeddings share their projection."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.text, self.bridge = Vision(), Text(), nn.Identity()
        self.cross, self.head = CrossAttention(), nn.Linear(WIDTH, CLASSES)
        self.image_embedding = nn.Linear(WIDTH, WIDTH, bias=False)
        self.text_embedding = nn.Linear(WIDTH, WIDTH, bias=False)
        self.text_embedding.weight = self.image_embedding.weight
        self.image_out, self.text_out = nn.Identity(), nn.Identity()
        self.spoil_image, self.spoil_text = nn.Identity(), nn.Identity()
        self.extra: Callable[[Toy], Tensor] = lambda _: torch.zeros(())
        self.loss_scale = 1.0

    def forward(self, pixels: Tensor, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        image, text = self.bridge(self.vision(pixels)), self.text(ids)
        logits = self.head(text + self.cross(text, image)[0])
        z_image = self.image_out(self.spoil_image(self.image_embedding(image.mean(1))))
        z_text = self.text_out(self.spoil_text(self.text_embedding(text.mean(1))))
        scores = 5 * functional.normalize(z_image, dim=-1) @ functional.normalize(z_text, dim=-1).T
        pairs = torch.arange(len(scores))
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.2 * (
            functional.cross_entropy(scores, pairs) + functional.cross_entropy(scores.T, pairs)
        )
        return {"loss": self.loss_scale * (loss + self.extra(self)), "logits": logits}


@cache
def appearance() -> Tensor:
    return torch.randn(CLASSES, 12, generator=torch.Generator().manual_seed(7))


def batch(draw: torch.Generator, size: int = BATCH, shift: float = 0.0) -> dict[str, Tensor]:
    classes = torch.randint(CLASSES, (size, PATCHES), generator=draw)
    pixels = appearance()[classes] + 0.3 * torch.randn(size, PATCHES, 12, generator=draw) + shift
    ids = torch.cat([torch.full((size, 1), CLASSES), classes[:, :-1]], dim=1)
    return {"pixels": pixels, "ids": ids, "labels": classes}


@cache
def trained_state() -> dict[str, Tensor]:
    """Weights behind 400 steps."""
    torch.manual_seed(0)
    model, draw = Toy(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(400):
        optimizer.param_groups[0]["lr"] = 5e-3 if step < 300 else 1e-3
        optimizer.zero_grad()
        model(**batch(draw))["loss"].backward()
        optimizer.step()
    return model.state_dict()


def toy() -> Toy:
    model = Toy()
    model.load_state_dict(trained_state())
    return model


WATCH: dict[str, Any] = {
    "modalities": {"vision": "vision", "text": "text"},
    "embeddings": {"vision": "image_out", "text": "text_out"},
    "cross_attention": ["cross"],
    "keys": {"vision": "cross.k_proj"},
    "head_shards": 2,
}


class Stale(nn.Module):
    """Hands on what it was given before."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        last, self.before = self.before, x.detach()
        return x if last is None else last


class Weak(nn.Module):
    """Lets a thousandth of the gradient through."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach() + 1e-3 * (x - x.detach())


class Hubs(nn.Module):
    """Some texts come near every image."""

    def forward(self, z: Tensor) -> Tensor:
        return functional.normalize(z, dim=-1) + 0.15 * torch.rand(len(z), 1)


class Offset(nn.Module):
    """All images share a direction."""

    def forward(self, z: Tensor) -> Tensor:
        return functional.normalize(z, dim=-1) + 0.45


class Constant(nn.Module):
    """A bias that outgrows the rest."""

    def forward(self, z: Tensor) -> Tensor:
        return z + 10 * z.detach().abs().mean()


def _overflow(model: Toy) -> None:
    with torch.no_grad():
        model.vision.block.weight *= 1e5


def _collapse(model: Toy) -> None:
    with torch.no_grad():
        model.cross.k_proj.weight.zero_()
    model.cross.k_proj.weight.requires_grad_(False)


def _fragile(model: Toy) -> None:
    with torch.no_grad():
        for parameter in (model.vision.norm.weight, model.vision.norm.bias):
            parameter *= 0.02
        for layer in (model.cross.k_proj, model.cross.v_proj):
            layer.weight *= 50.0


def _kv_shift(model: Toy) -> None:
    half = WIDTH // 2
    with torch.no_grad():
        for parameters, scale in ((model.cross.k_proj, 8.0), (model.cross.q_proj, 1 / 8)):
            parameters.weight[half:] *= scale
            parameters.bias[half:] *= scale


def _hubs(model: Toy) -> None:
    model.spoil_image, model.spoil_text = Offset(), Hubs()


def _pull_apart(model: Toy) -> None:
    ones = torch.ones(1, WIDTH)

    def pull(model: Toy) -> Tensor:
        return (model.image_embedding(ones) - 30).square().mean() + (model.text_embedding(ones) + 30).square().mean()

    model.extra = pull


def _set(name: str, value: Any) -> Callable[[Toy], None]:
    return lambda model: setattr(model, name, value)


@dataclass(frozen=True)
class Plant:
    """A fault from step `at` on, and the monitor and place that must be named first."""

    monitor: str
    of: str
    break_: Callable[[Toy], None]
    at: int = 20
    steps: int = 60
    shift: float = 0.0
    interval: int = 2


PLANTS = {
    "an fp16 block of the image tower overflows": Plant("overflow", "vision.block", _overflow),
    "cross-attention looks at everything alike": Plant("attention_collapse", "cross", _collapse),
    "text output hangs on tiny differences of image features": Plant("robustness", "vision", _fragile),
    "some captions are near every image": Plant("cmrc", "vision+text", _hubs),
    "a bias drowns the embeddings": Plant(
        "jed",
        "vision+text",
        lambda model: (_set("spoil_image", Constant())(model), _set("spoil_text", Constant())(model)),
    ),
    "almost no gradient reaches the image tower": Plant(
        "gradient_attenuation", "branches: vision", lambda model: _set("bridge", Weak())(model)
    ),
    "two modalities pull a tied projection apart": Plant("shared_conflict", "image_embedding.weight", _pull_apart),
    "the loss is a sum over far too many tokens": Plant("gradient_variance", "gradient", _set("loss_scale", 1e6), at=0),
    "heads of one rank have larger keys": Plant("kv_shift", "vision", _kv_shift),
    "attention reads features of the microbatch before": Plant(
        "stale_features", "vision", lambda model: _set("bridge", Stale())(model)
    ),
    "images of another kind come in": Plant(
        "drift", "vision", lambda model: None, at=150, steps=220, shift=1.0, interval=1
    ),
}


def run_toy(
    file: Path | None,
    plant: Plant | None = None,
    *,
    seed: int = 0,
    steps: int = 60,
    model: Toy | None = None,
    learning_rate: float = 1e-4,
    **watch: Any,
) -> Any:
    """Train the healthy model on, two microbatches a step, and break it on the way; what watched it."""
    model = toy() if model is None else model
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(1000 + seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    health = attach(model, **WATCH, **{"file": file, "interval": 2 if plant is None else plant.interval, **watch})
    with health:
        for step in range(steps if plant is None else plant.steps):
            broken = plant is not None and step >= plant.at
            if plant is not None and step == plant.at:
                plant.break_(model)
            optimizer.zero_grad()
            for _ in range(2):
                output = model(**batch(draw, shift=plant.shift if broken else 0.0))
                (output["loss"] / 2).backward()
            optimizer.step()
    return health


def losses_of(model: Toy, seeds: Iterator[int]) -> list[float]:
    return [float(model(**batch(torch.Generator().manual_seed(seed)))["loss"]) for seed in seeds]
