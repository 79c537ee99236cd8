"""A model of two towers, a shared trunk and a tied table, and its scaled training on several processes."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from numerics_ranks import run_cases
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mmplan.runtime.numerics.global_norm import gradient_norms
from mmplan.runtime.numerics.grad_scaler import ModalityGradScaler
from mmplan.runtime.numerics.sharing import Sharing

PROCESSES = 2
WIDTH = 6


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.table = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(torch.tanh(self.first(x)))


class Model(nn.Module):
    """vision and audio, whose tables are one parameter; a trunk reads both."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vision, self.audio, self.trunk = Tower(), Tower(), nn.Linear(WIDTH, 3)
        if tied:
            self.audio.table.weight = self.vision.table.weight

    def forward(self, images: Tensor, clips: Tensor | None) -> Tensor:
        x = self.vision(images)
        if clips is not None:
            x = x + self.audio(clips)
        return self.trunk(torch.tanh(x))


def batch(seed: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def scaler_of(model: Model, **options: Any) -> ModalityGradScaler:
    scaler = ModalityGradScaler(model, {"vision": model.vision, "audio": model.audio}, **options)
    scaler.update({"vision": 2.0**5, "audio": 2.0**12, "shared": 2.0**9})
    return scaler


def overflow(module: nn.Module) -> None:
    """Let the next gradient of its output overflow."""

    def burst(_: nn.Module, __: Any, output: Tensor) -> None:
        handle.remove()
        output.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))

    handle = module.register_forward_hook(burst)


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def scales(scaler: ModalityGradScaler) -> dict[str, float]:
    return scaler.state_dict()["scale"]


def _trained(model: nn.Module, inner: Model, scaler: ModalityGradScaler, rank: int) -> dict[str, Any]:
    """A sound step, then one in which the vision tower of rank 1 overflows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler.scale(model(*batch(rank)).square().mean()).backward()
    scaler.unscale_(optimizer)
    norms = gradient_norms(Sharing(model, {"vision": inner.vision, "audio": inner.audio}))
    result: dict[str, Any] = {"gradients": gradients(inner), "norms": {part: n.item() for part, n in norms.of.items()}}
    optimizer.zero_grad()
    scaler.update()
    before = {name: full(p.detach()).clone() for name, p in inner.named_parameters()}
    if rank == 1:
        overflow(inner.vision.first)
    scaler.scale(model(*batch(rank)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    result["moved"] = {name for name, p in inner.named_parameters() if not torch.equal(full(p.detach()), before[name])}
    return result | {"scales": scales(scaler)}


def _ddp(rank: int) -> dict[str, Any]:
    model = Model()
    return _trained(DistributedDataParallel(model), model, scaler_of(model), rank)


def _several(rank: int) -> dict[str, Any]:
    """Gradients of two losses: of two microbatches, of one forward in one backward, and of it in two backwards."""
    found = {}
    for name in ("microbatches", "one backward", "two backwards"):
        model = Model()
        ddp, scaler = DistributedDataParallel(model), scaler_of(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if name == "microbatches":
            with ddp.no_sync():
                scaler.scale(ddp(*batch(rank)).square().mean()).backward()
            scaler.scale(ddp(*batch(rank + PROCESSES)).square().mean()).backward()
        else:
            output = ddp(*batch(rank))
            losses = scaler.scale([output.square().mean(), output.abs().mean()])
            if name == "one backward":
                torch.autograd.backward(losses)
            else:
                losses[0].backward(retain_graph=True)
                losses[1].backward()
        scaler.unscale_(optimizer)
        found[name] = gradients(model)
    return found


def _absent(rank: int) -> dict[str, Any]:
    """Rank 0 has no clips, so that its audio tower gets gradients from rank 1 alone."""
    model = Model(tied=False)
    ddp, scaler = DistributedDataParallel(model, find_unused_parameters=True), scaler_of(model, growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    images, clips = batch(rank)
    scaler.scale(ddp(images, clips if rank else None).square().mean()).backward()
    scaler.unscale_(optimizer)
    result = {"gradients": gradients(model)}
    scaler.step(optimizer)
    scaler.update()
    return result | {"scales": scales(scaler)}


def _fsdp(rank: int) -> dict[str, Any]:
    model = Model(tied=False)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for module in (model.vision, model.audio, model):
        fully_shard(module, mesh=mesh)
    return _trained(model, model, scaler_of(model), rank)


def _pipeline(rank: int) -> dict[str, Any]:
    """Rank 0 has the first half of the vision tower, rank 1 the second and the trunk."""
    whole = Model(tied=False)
    images, _ = batch(0)
    model = copy.deepcopy(whole.vision.first if rank == 0 else nn.ModuleList([whole.vision.table, whole.trunk]))
    own = model.parameters() if rank == 0 else model[0].parameters()
    scaler = ModalityGradScaler(model, {"vision": own})
    scaler.update({"vision": 2.0**5, "shared": 2.0**9})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for bursting in (False, True):
        received = torch.empty(4, WIDTH)
        if rank == 0:
            hidden = torch.tanh(model(images))
            dist.send(hidden.detach(), 1)
            dist.recv(received, 1)
            hidden.backward(torch.full_like(received, torch.inf) if bursting else received)
        else:
            dist.recv(received, 0)
            hidden = received.requires_grad_()
            features = scaler.cross(model[0](hidden), "vision", "shared")
            scaler.scale(model[1](torch.tanh(features)).square().mean()).backward()
            dist.send(hidden.grad, 0)
        scaler.unscale_(optimizer)
        found = {} if bursting else gradients(model)
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
        scaler.update()
        optimizer.zero_grad()
        if not bursting:
            sound = found
    return {"gradients": sound, "moved": moved, "scales": scales(scaler)}


def run_scaler_cases(rank: int, folder: str) -> None:
    run_cases(
        rank,
        folder,
        PROCESSES,
        {"DDP": _ddp, "several": _several, "absent": _absent, "FSDP2": _fsdp, "pipeline": _pipeline},
    )
