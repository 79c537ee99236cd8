"""What each of four processes, two nodes of two ranks, finds out about compressed gradients."""

import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from case_processes import meeting
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mmplan.cost_models.compressed_bytes import TOP_K_FP8, TOP_K_SIGN, GradientFormat
from mmplan.runtime.compression.ddp_hooks import (
    LowRankState,
    TopKState,
    TwoLevelState,
    low_rank_hook,
    top_k_hook,
    two_level_hook,
)
from mmplan.runtime.compression.feedback import ErrorFeedback
from mmplan.runtime.compression.fsdp_hooks import (
    MessageReduceScatter,
    ReduceScatterState,
    compress_across,
    compress_reduce_scatter,
    reduce_scatter_hook,
)
from mmplan.runtime.compression.socket_bytes import received_bytes

PROCESSES = 4
STEPS = 6
TOWERS = {"vision": "vision.", "text": "text."}
HOOKS = ("top k", "two levels", "low rank")
SHARDED = ("fsdp2 across", "fsdp2 scatter", "fsdp1 scatter")
ALL_IN_FP8 = GradientFormat(values="fp8", fraction=1, block=128)


class TwoTowers(nn.Module):
    """Of width 40 and 24, which meet in a head."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vision = nn.Sequential(nn.Linear(40, width), nn.ReLU(), nn.Linear(width, width))
        self.text = nn.Sequential(nn.Linear(24, width), nn.ReLU(), nn.Linear(width, width))
        self.head = nn.Linear(width, 7)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.vision(x[:, :40]) * self.text(x[:, 40:]))
        return out


class Setup:
    """One way to train: the wrapped model, and the state of its compression (None: uncompressed)."""

    def __init__(self, kind: str, mesh: DeviceMesh, form: GradientFormat | None = None, width: int = 48) -> None:
        inside, across = mesh["inside"], mesh["across"].get_group()
        self.state: Any = None
        self.bare = TwoTowers(width)
        self.model: nn.Module = self.bare
        if kind in ("plain", *HOOKS):
            wrapped = DistributedDataParallel(self.bare, bucket_cap_mb=0.005)  # several buckets, made anew after a step
            self.model = wrapped
            if kind == "top k":
                self.state = TopKState(self.bare, form or TOP_K_SIGN)
                wrapped.register_comm_hook(self.state, top_k_hook)
            elif kind == "two levels":
                self.state = TwoLevelState(self.bare, inside.get_group(), across, form or TOP_K_FP8)
                wrapped.register_comm_hook(self.state, two_level_hook)
            elif kind == "low rank":
                self.state = LowRankState(self.bare, TOWERS)
                wrapped.register_comm_hook(self.state, low_rank_hook)
        elif kind == "fsdp1 scatter":
            policy = ModuleWrapPolicy({nn.Sequential})
            fsdp1 = FullyShardedDataParallel(self.bare, auto_wrap_policy=policy, device_id=torch.device("cpu"))
            self.model = fsdp1
            self.state = ReduceScatterState(fsdp1, form or TOP_K_SIGN)
            fsdp1.register_comm_hook(self.state, reduce_scatter_hook)
        else:
            ranks = inside if kind == "fsdp2 across" else init_device_mesh("cpu", (PROCESSES,))
            for part in (self.bare.vision, self.bare.text, self.bare):
                fully_shard(part, mesh=ranks)
            if kind == "fsdp2 across":
                self.state = ErrorFeedback(form or TOP_K_FP8, across)
                compress_across(self.bare, self.state)
            else:
                self.state = ErrorFeedback(form or TOP_K_SIGN)
                compress_reduce_scatter(self.bare, self.state)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def backward(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()

    def gradients(self) -> Tensor:
        """Whole, flat."""
        parts = [p.grad for p in self.model.parameters() if p.grad is not None]
        return torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in parts]).clone()

    def weights(self) -> list[Tensor]:
        own = [p.to_local() if isinstance(p, DTensor) else p for p in self.model.parameters()]
        return [p.detach().clone() for p in own]


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(16, 64, generator=generator)
    return x, x[:, 30:37].argmax(1)


def mean_over_ranks(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def telescopes(kind: str, rank: int, mesh: DeviceMesh) -> float:
    """Error of: what was said in all steps and what is not said yet are all gradients."""
    setup, plain = Setup(kind, mesh), Setup("plain", mesh)
    said, true = torch.zeros(()), torch.zeros(())
    for step in range(STEPS):
        setup.backward(*batch(rank, step))
        plain.backward(*batch(rank, step))
        said, true = said + setup.gradients(), true + plain.gradients()
    unsaid = []
    residuals = setup.state.state_dict()["residuals"]
    turned = (
        {name for group in setup.state.low_rank.fused if group.turned for name in group.names}
        if kind == "low rank"
        else ()
    )
    for name, p in setup.bare.named_parameters():
        residual = residuals.get(name, torch.zeros(0))
        residual = residual.T if name in turned else residual
        if kind == "two levels" and residual.numel():  # a part on each rank of a node, of the mean of the node
            parts = [torch.zeros_like(residual) for _ in range(2)]
            dist.all_gather(parts, residual, group=mesh["inside"].get_group())
            residual = torch.cat(parts)[: p.numel()]
        unsaid.append(residual.flatten() if residual.numel() else torch.zeros(p.numel()))
    return relative(said + mean_over_ranks(torch.cat(unsaid)), true)


def alike(tensor: Tensor) -> bool:
    """The same bits on all ranks."""
    everywhere = [torch.zeros_like(tensor) for _ in range(PROCESSES)]
    dist.all_gather(everywhere, tensor)
    return all(torch.equal(other, tensor) for other in everywhere)


def resumes(kind: str, rank: int, mesh: DeviceMesh) -> bool:
    """A run that is saved and taken up by new objects ends in the bits of one that is not."""

    def train(setup: Setup, first: int, last: int) -> None:
        for step in range(first, last):
            setup.backward(*batch(rank, step))
            setup.optimizer.step()

    whole = Setup(kind, mesh)
    train(whole, 0, STEPS)
    half = Setup(kind, mesh)
    train(half, 0, STEPS // 2)
    file = io.BytesIO()
    torch.save([half.weights(), half.optimizer.state_dict(), half.state.state_dict()], file)
    train(half, STEPS // 2, STEPS)  # what goes on must not change what was saved
    file.seek(0)
    weights, optimizer, state = torch.load(file, weights_only=False)
    resumed = Setup(kind, mesh)
    for p, weight in zip(resumed.model.parameters(), weights, strict=True):
        (p.to_local() if isinstance(p, DTensor) else p).data.copy_(weight)
    resumed.optimizer.load_state_dict(optimizer)
    resumed.state.load_state_dict(state)
    train(resumed, STEPS // 2, STEPS)
    pairs = zip(resumed.weights(), whole.weights(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def error_of_all_in_fp8(kind: str, rank: int, mesh: DeviceMesh) -> float:
    """Of a gradient of which every element is sent, relative to the uncompressed one."""
    setup, plain = Setup(kind, mesh, ALL_IN_FP8), Setup("plain", mesh)
    setup.backward(*batch(rank, 0))
    plain.backward(*batch(rank, 0))
    if kind == "fsdp1 scatter":  # flat shards of units, in an order of their own
        own = torch.cat([p.grad.flatten() for p in setup.model.parameters() if p.grad is not None])
        squares = own.square().sum()
        dist.all_reduce(squares)
        return abs(float(squares.sqrt() / plain.gradients().norm()) - 1)
    return relative(setup.gradients(), plain.gradients())


def overflow(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """A step in which one rank has an infinity, and the one behind it."""
    found = {}
    for kind in HOOKS:
        setup = Setup(kind, mesh)
        setup.backward(*batch(rank, 0))
        before = setup.state.state_dict()["residuals"]
        x, y = batch(rank, 1)
        setup.backward(x * (torch.inf if rank == 1 else 1.0), y)
        seen = not setup.gradients().isfinite().all()
        after = setup.state.state_dict()["residuals"]
        finite = all(residual.isfinite().all() for residual in after.values())
        setup.backward(*batch(rank, 2))
        kept = torch.equal(before["head.weight"], after["head.weight"]) if "head.weight" in before else None
        found[kind] = (seen, finite, bool(setup.gradients().isfinite().all()), kept)
    return found


def wires(setup: Setup, kind: str) -> list[Any]:
    state = setup.state
    if kind == "low rank":
        return [state.low_rank.wire]
    if kind == "two levels":
        return [state.levels.wire, state.levels.feedback.wire]
    return [getattr(state, "feedback", state).wire]


def bytes_of_a_step(kind: str, rank: int, mesh: DeviceMesh) -> tuple[int, int, int]:
    """Payload and sent bytes as counted, and bytes that arrived as TCP counts them, of all ranks together."""
    setup = Setup(kind, mesh, width=640)
    setup.backward(*batch(rank, 0))
    counted = [(wire.payload_bytes, wire.sent_bytes) for wire in wires(setup, kind)]
    dist.barrier()
    before = received_bytes()
    setup.backward(*batch(rank, 1))
    dist.barrier()
    measured = received_bytes() - before
    again = [(wire.payload_bytes, wire.sent_bytes) for wire in wires(setup, kind)]
    step = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(counted, again, strict=True)]
    totals = torch.tensor([sum(s[1] for s in step), measured])
    dist.all_reduce(totals)
    return sum(s[0] for s in step), *totals.tolist()


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    state = TopKState(TwoTowers(), TOP_K_SIGN)
    saved = state.state_dict()

    def hsdp() -> None:
        model = TwoTowers()
        fully_shard(model, mesh=mesh)
        compress_across(model, ErrorFeedback(TOP_K_FP8))

    def hybrid() -> None:
        model = FullyShardedDataParallel(
            TwoTowers(),
            device_id=torch.device("cpu"),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_mesh=mesh,
        )
        ReduceScatterState(model, TOP_K_SIGN)

    def other_model() -> None:
        wrapped = DistributedDataParallel(TwoTowers())
        wrapped.register_comm_hook(state, top_k_hook)
        wrapped(torch.zeros(1, 64)).sum().backward()

    def operation() -> None:
        sums = MessageReduceScatter("llm", ErrorFeedback(TOP_K_FP8))
        sums(torch.zeros(1), torch.zeros(4), mesh.get_group("inside"), dist.ReduceOp.MAX)

    low_rank = LowRankState(TwoTowers(), TOWERS)
    calls: dict[str, Callable[[], Any]] = {
        "form": lambda: TopKState(TwoTowers(), TOP_K_FP8).load_state_dict(saved),
        "ranks": lambda: TopKState(TwoTowers(), group=mesh["inside"].get_group()).load_state_dict(saved),
        "low rank": lambda: LowRankState(TwoTowers(), TOWERS, rank=2).load_state_dict(low_rank.state_dict()),
        "tower": lambda: LowRankState(TwoTowers(), {"audio": "audio."}),
        "rank": lambda: LowRankState(TwoTowers(), TOWERS, rank=0),
        "hsdp": hsdp,
        "hybrid": hybrid,
        "unsharded": lambda: compress_across(TwoTowers(), ErrorFeedback(TOP_K_FP8)),
        "model": other_model,
        "operation": operation,
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except (ValueError, RuntimeError) as error:
            found[name] = str(error).splitlines()[0]
    return found


def run_compression_cases(rank: int, folder: str) -> None:
    """Body of one of the processes; writes its results to `folder`."""
    with meeting(rank, folder, PROCESSES) as results:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "inside"))
        hook_gradients = {}
        for kind in HOOKS:
            setup = Setup(kind, mesh)
            setup.backward(*batch(rank, 0))
            hook_gradients[kind] = alike(setup.gradients())
        results |= {
            "alike": hook_gradients,
            "telescopes": {kind: telescopes(kind, rank, mesh) for kind in HOOKS},
            "resumes": {kind: resumes(kind, rank, mesh) for kind in (*HOOKS, *SHARDED)},
            "fp8": {kind: error_of_all_in_fp8(kind, rank, mesh) for kind in ("top k", "two levels", *SHARDED)},
            "overflow": overflow(rank, mesh),
            "bytes": {kind: bytes_of_a_step(kind, rank, mesh) for kind in HOOKS},
            "refusals": refusals(mesh),
        }
