"""Two processes that reproduce the hangs which `mmplan check --runtime` explains, each with and without its fix."""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

HANGS_AFTER_S = 4.0  # a thousand times what the cases take
LARGE = 8_000_000  # elements, far beyond what a socket buffers


class TwoModules(nn.Module):
    """A vision tower that only runs on images, and a language model that always runs."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Linear(16, 16)
        self.llm = nn.Linear(16, 16)

    def forward(self, text: Tensor, images: Tensor | None, dummy: bool) -> Tensor:
        if images is None and dummy:
            text = text + 0.0 * self.vision(torch.zeros(1, 16)).sum()
        elif images is not None:
            text = text + self.vision(images).sum(0)
        loss: Tensor = self.llm(text).sum()
        return loss


def images_of(rank: int) -> Tensor | None:
    return torch.ones(3, 16) if rank == 0 else None


def sharded_parameters(rank: int, fixed: bool) -> None:
    """FSDP, and ZeRO-3 alike: rank 1 has no image and skips the vision tower's all-gathers."""
    mesh = init_device_mesh("cpu", (2,))
    model = TwoModules()
    for part in (model.vision, model.llm, model):
        fully_shard(part, mesh=mesh)
    for _ in range(2):
        model(torch.ones(2, 16), images_of(rank), fixed).backward()


def unequal_gradients(rank: int, fixed: bool) -> None:
    """ZeRO-2: gradients that exist are reduced as one buffer; rank 1 has none of the vision tower."""
    model = TwoModules()
    model(torch.ones(2, 16), images_of(rank), False).backward()
    if fixed:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    made = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    dist.all_reduce(torch.cat(made))


def text_only_microbatch(rank: int, fixed: bool) -> None:
    """Rank 0 encodes images for rank 1, which expects a tensor for each of three microbatches; the second has none."""
    for images in (3, 0, 2):
        if rank == 0 and (images or fixed):
            dist.send(torch.ones(4 if fixed else images), 1)
        elif rank == 1:
            dist.recv(torch.empty(4 if fixed else 3), 0)


def fixed_order(rank: int, fixed: bool) -> None:
    """Both ranks first send and then receive, with tensors that no buffer holds."""
    sent, received = torch.ones(LARGE), torch.empty(LARGE)
    if fixed:
        both = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
    else:
        dist.send(sent, 1 - rank)
        dist.recv(received, 1 - rank)


CASES: dict[str, Callable[[int, bool], None]] = {
    "fsdp": sharded_parameters,
    "zero2": unequal_gradients,
    "text-only": text_only_microbatch,
    "fixed-order": fixed_order,
}


def outcome(case: Callable[[int, bool], None], rank: int, fixed: bool, wait_s: float) -> str:
    """`done`, `waits`, or what the library said."""
    result = ["waits"]

    def run() -> None:
        try:
            case(rank, fixed)
            result[0] = "done"
        except Exception as error:
            result[0] = str(error).splitlines()[0]

    dist.barrier()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(wait_s)
    return result[0]


def run_hang_case(name: str, rank: int, folder: str) -> None:
    """One of the two; what happened with the fix and without it is in files of the folder."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = f"file://{folder}/{name}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=90))
    for fixed, wait_s in ((True, 60.0), (False, HANGS_AFTER_S)):
        found = outcome(CASES[name], rank, fixed, wait_s)
        (Path(folder) / f"{name}-{rank}-{'with' if fixed else 'without'}").write_text(found)
    time.sleep(HANGS_AFTER_S)  # a rank that is done stays, like a training process in its next step
    os._exit(0)
