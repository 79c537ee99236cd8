"""What two processes read off a model that is replicated, sharded, split by heads or cut into a pipeline."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from health_toys import HEADS, WATCH, WIDTH, CrossAttention, Toy, batch, toy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from mmplan.runtime.health.groups import Groups
from mmplan.runtime.health.hooks import attach
from mmplan.runtime.health.statistics import gradient_norms

Readings = dict[tuple[str, str], float | None]


def halves() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [batch(draw), batch(draw)]


def by_name(health: Any) -> Readings:
    return {(reading.monitor, reading.of): reading.value for reading in health.readings}


def step(model: nn.Module, part: dict[str, Tensor], scale: float = 1.0) -> None:
    (scale * model(**part)["loss"]).backward()


def robustness_of_halves() -> float:
    """The mean of what one process reads of each."""
    values = []
    for part in halves():
        model = toy()
        with attach(model, **WATCH, interval=1) as health:
            step(model, part)
            health.step()
        values.append(by_name(health)["robustness", "vision"])
    return sum(values) / len(values)


def replicated(rank: int) -> Readings:
    model = toy()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attach(wrapped, **WATCH, interval=1, groups=Groups(replicas=dist.group.WORLD)) as health:
        step(wrapped, halves()[rank])
        optimizer.step()
    return by_name(health)


def sharded(rank: int) -> dict[str, Any]:
    model = toy()
    mesh = init_device_mesh("cpu", (2,))
    for part in (model.vision, model.text, model.cross):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attach(model, **WATCH, interval=1) as health:  # the mesh tells the group
        step(model, halves()[rank])
        norms = gradient_norms(model, health._settings)
        optimizer.step()
        healthy = by_name(health)
        optimizer.zero_grad()
        part = halves()[rank]
        part["pixels"] = part["pixels"] * (1e7 if rank == 1 else 1.0)  # too much for fp16, on one rank
        step(model, part)
        optimizer.step()
    found = [r for r in health.readings if r.step == 1]
    return {"healthy": healthy, "norms": norms, "overflow": [(r.monitor, r.of, dict(r.detail)) for r in found]}


class HalfOfHeads(nn.Module):
    """The keys of the first or the second half of the heads."""

    def __init__(self, whole: CrossAttention, rank: int) -> None:
        super().__init__()
        rows = slice(rank * WIDTH // 2, (rank + 1) * WIDTH // 2)
        self.k_proj = nn.Linear(WIDTH, WIDTH // 2)
        with torch.no_grad():
            self.k_proj.weight.copy_(whole.k_proj.weight[rows])
            self.k_proj.bias.copy_(whole.k_proj.bias[rows])

    def forward(self, x: Tensor) -> Tensor:
        return self.k_proj(x).square().mean()


def uneven_heads() -> CrossAttention:
    torch.manual_seed(5)
    cross = CrossAttention()
    with torch.no_grad():
        cross.k_proj.weight[WIDTH // 2 :] *= 4.0
    assert HEADS % 2 == 0
    return cross


def features() -> Tensor:
    return torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(9))


def by_heads(rank: int) -> Readings:
    model = HalfOfHeads(uneven_heads(), rank)
    settings: dict[str, Any] = {"modalities": {}, "keys": {"vision": "k_proj"}, "interval": 1}
    with attach(model, **settings, groups=Groups(shards=dist.group.WORLD)) as health:
        model(features()).backward()
        health.step()
    return by_name(health) if rank == 0 else {}


class Front(nn.Module):
    def __init__(self, whole: Toy) -> None:
        super().__init__()
        self.vision = whole.vision

    def forward(self, pixels: Tensor) -> Tensor:
        return self.vision(pixels)


class Identity(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        return image


# Embeddings on two stages.
STAGED: dict[str, Any] = {**WATCH, "embeddings": {"vision": "vision", "text": "text_out"}, "interval": 1}


def in_stages(rank: int) -> Readings:
    """Images on rank 0, everything else on rank 1; two microbatches."""
    whole, groups = toy(), Groups(stages=dist.group.WORLD)
    if rank == 0:
        front = Front(whole)
        with attach(front, **STAGED, groups=groups) as health:
            for part in halves():
                made = front(part["pixels"])
                dist.send(made.detach(), 1)
                gradient = torch.empty_like(made)
                dist.recv(gradient, 1)
                made.backward(gradient)
            health.step()
        return by_name(health)
    whole.vision = Identity()
    back = nn.ModuleDict({"toy": whole})  # no module here has the name of the other stage's
    back.forward = lambda *args: whole(*args)  # type: ignore[method-assign]
    paths = {"text": "toy.text", "cross": "toy.cross", "cross.k_proj": "toy.cross.k_proj", "text_out": "toy.text_out"}

    def here(named: Any) -> Any:
        return {key: paths.get(path, path) for key, path in named.items()}

    settings = {**STAGED, **{key: here(STAGED[key]) for key in ("modalities", "embeddings", "keys")}}
    with attach(back, **{**settings, "cross_attention": ["toy.cross"]}, groups=groups) as health:
        for part in halves():
            received = torch.empty(len(part["pixels"]), 8, WIDTH)
            dist.recv(received, 0)
            received.requires_grad_()
            (0.5 * back(received, part["ids"], part["labels"])["loss"]).backward()
            dist.send(received.grad, 0)
        health.step()
    return by_name(health)


def tensor_parallel(rank: int) -> dict[str, Any]:
    """The toy with layers split by columns, its attention by heads; both ranks have the same data."""
    model, mesh = toy(), init_device_mesh("cpu", (2,))
    whole_again = (Shard(2), None), (Replicate(), None)
    columns = ColwiseParallel(output_layouts=Replicate())
    by_heads = {f"cross.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    rest = {"cross": PrepareModuleOutput(output_layouts=whole_again[0], desired_output_layouts=whole_again[1])}
    split = dict.fromkeys(("text.block", "head", "image_embedding"), columns)
    parallelize_module(model, mesh, {**by_heads, **rest, **split})
    model.text_embedding = nn.Linear(WIDTH, WIDTH, bias=False)
    parallelize_module(model, mesh, {"text_embedding": columns})
    model.text_embedding.weight = model.image_embedding.weight
    with attach(model, **{**WATCH, "head_shards": 1}, interval=1) as health:
        for part in halves():
            step(model, part, 0.5)
        norms = gradient_norms(model, health._settings)
        health.step()
    return {"readings": by_name(health), "norms": norms, "layers": _norms_of_layers(mesh)}


def _norms_of_layers(mesh: Any) -> dict[str, float]:
    """Norms of gradients where DTensors split a layer by columns and the next by rows."""
    model = nn.ModuleDict({"vision": two_layers(0), "text": two_layers(1)})
    for part in model.values():
        parallelize_module(part, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = features()
    sum(part(x).square().mean() for part in model.values()).backward()  # type: ignore[union-attr]
    settings = attach(model, modalities={"vision": "vision", "text": "text"})
    settings.close()
    return gradient_norms(model, settings._settings)


def two_layers(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))


def run_cases(rank: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": (Path(folder) / "port").read_text()}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    cases = {f.__name__: f(rank) for f in (replicated, sharded, by_heads, in_stages, tensor_parallel)}
    torch.save(cases, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
