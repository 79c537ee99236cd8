"""Our schedules as CSV in torch's own pipelining runtime: the body of its two processes, and one process."""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

RANKS, M, WIDTH = 2, 6, 8
# schedule: chunks per rank and the rank of each stage
LOOPED, V_SHAPED = [0, 1, 0, 1], [0, 1, 1, 0]
PLACES = {"1f1b": [0, 1], "zb-h1": [0, 1], "interleaved": LOOPED, "looped-bfs": LOOPED, "zb-v": V_SHAPED}


def layers(count: int) -> nn.ModuleList:
    torch.manual_seed(1)
    return nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count))


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shape = (M * 2, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def one_process(count: int) -> tuple[list[float], list[Tensor]]:
    """Losses of the microbatches and all gradients."""
    model, (inputs, targets) = layers(count), samples()
    losses = []
    for x, target in zip(inputs.chunk(M), targets.chunk(M), strict=True):
        for layer in model:
            x = layer(x)
        loss = loss_of(x, target)
        loss.backward()
        losses.append(loss.item())
    return losses, [p.grad for p in model.parameters() if p.grad is not None]


def run_rank(rank: int, folder: str) -> None:
    """Every schedule once; writes losses and gradients by stage."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    results = {}
    for name, places in PLACES.items():
        model = layers(len(places))
        own = [stage for stage, place in enumerate(places) if place == rank]
        stages = [PipelineStage(model[s], s, len(places), torch.device("cpu")) for s in own]
        runtime = _PipelineScheduleRuntime(stages, M, loss_fn=loss_of, scale_grads=False)
        runtime._load_csv(f"{folder}/{name}.csv", "compute_only")
        inputs, targets = samples()
        losses: list[Tensor] = []
        runtime.step(
            *((inputs,) if 0 in own else ()),
            target=targets if len(places) - 1 in own else None,
            losses=losses if len(places) - 1 in own else None,
        )
        gradients = {s: [p.grad for p in model[s].parameters()] for s in own}
        results[name] = ([float(loss) for loss in losses], gradients)
    torch.save(results, Path(folder) / f"torch{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
