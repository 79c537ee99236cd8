"""What four processes run of the plans of `job_plan_cases.py`, and what is asked of their results."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from case_processes import given_to, meeting
from job_fault_cases import FAULTS, faulty
from job_plan_cases import SPLIT, job_of
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mmplan.errors import InputError
from mmplan.planner.plan import Plan
from mmplan.planner.step_loads import part_size
from mmplan.runtime.checkpoint.pieces import pieces_of, to_write
from mmplan.runtime.clock import WallClock
from mmplan.runtime.executor import run_step
from mmplan.runtime.first_gradients import FirstGradients, GradientPart
from mmplan.runtime.ghost.model import saved_buffers
from mmplan.runtime.ghost.recording import Recorder, loss_of
from mmplan.runtime.ghost.splits import find_splits
from mmplan.runtime.ghost.train import JobGroups, prepare_job
from mmplan.runtime.ghost.units import find_units
from mmplan.runtime.ghost.weightless import build_weightless, initial_value
from mmplan.runtime.groups import group_maker, replica_group, tensor_ranks
from mmplan.runtime.places import idle_ranks, place_of
from mmplan.runtime.state import StageState
from mmplan.runtime.tensor_sums import TensorRanks

PROCESSES, MORE_PROCESSES = 4, 5
CPU = torch.device("cpu")


def whole_job(family: str, plan: Plan) -> tuple[dict[str, Tensor], float]:
    """Gradients and loss of the first step in one process."""
    _, gradients, total = whole_model(family, plan)
    return gradients, total


def telling_value(name: str, like: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    """The first value, but for zeros, such as of gates: behind them there would be no gradients to compare."""
    value = initial_value(name, like, seed, dtype)
    return value if value.any() else torch.full_like(value, 0.02)


def whole_model(family: str, plan: Plan) -> tuple[nn.Module, dict[str, Tensor], float]:
    """The model behind the first step, as its authors run it, the sums of its gradients, and the loss."""
    job = job_of(family)
    model, seed = job.model(), plan.scenario.seed
    bare = build_weightless(job.model, seed)
    for name, parameter in model.named_parameters():
        parameter.data = telling_value(name, bare.get_parameter(name), seed, torch.float32)
    for module in plan.scenario.model.modules:
        if plan.scenario.precision_of(module) == "bf16":
            in_bf16(model.get_submodule({"vision": "model.vision_tower", "eye": "eye"}[module.name]))
    gradients: dict[str, Tensor] = {}
    stream = iter(job.batches(part_size(plan)))
    first = [next(stream) for _ in range(plan.parts * plan.microbatches)]
    weights, total = [job.weight(batch) for batch in first], 0.0
    for batch, weight in zip(first, weights, strict=True):
        loss = loss_of(model(**batch)) * (weight / sum(weights))
        loss.backward()
        total += float(loss.detach())
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0.0) + parameter.grad.float()
                parameter.grad = None
    return model, gradients, total


def in_bf16(module: nn.Module) -> None:
    """Its weights, and what it computes of what it is given in fp32."""
    module.to(torch.bfloat16)
    forward = module.forward

    def cast(value: Any, dtype: torch.dtype) -> Any:
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if floats else value

    def called(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(lambda value: cast(value, torch.bfloat16), (args, kwargs))
        return tree_map(lambda value: cast(value, torch.float32), forward(*args, **kwargs))

    module.forward = called


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRankResult:
    parts: Sequence[GradientPart]
    split: int  # parameters of which the rank has a part
    notes: tuple[str, ...]
    written: dict[str, int]  # elements that the rank writes to checkpoints, of those that it holds
    buffers: dict[str, Tensor]  # that it writes
    loss: float
    moved_bytes: dict[str, int]  # sent, shared, exchanged in layers, with what was foreseen beside them
    planned_bytes: dict[str, int]
    ties: int  # sums over stages
    postponed: int  # gradients of weights that autograd did not make


@dataclass
class Postponed:
    """Counts them."""

    gradients: int = 0

    def take(self, parameter: Tensor, gradient: Tensor) -> None:
        self.gradients += 1

    def before_update(self, state: StageState) -> None:
        """Nothing is asked of it."""


def run_job_rank(family: str, plan: Plan, rank: int, control: dist.ProcessGroup) -> JobRankResult:
    """One step of plain gradient descent, so long that rounding of the weights hides nothing."""
    timeout = timedelta(seconds=90)
    groups = JobGroups(
        replicas=replica_group(plan, rank, "gloo", timeout),
        tensor=tensor_ranks(plan, rank, "gloo", timeout),
        more=group_maker(rank, "gloo", timeout),
    )
    notes: list[str] = []
    with (
        patch("mmplan.runtime.ghost.train.FIRST_BATCHES", 6),
        patch("mmplan.runtime.ghost.train.initial_value", telling_value),
    ):
        prepared = prepare_job(plan, job_of(family), rank, CPU, groups, notes.append)
    program, stages = prepared.step(0)
    gradients = FirstGradients(prepared.stages)
    postponed = Postponed()
    for stage in prepared.stages:
        stage.watch = postponed
    clock = WallClock(control, one_host=True)
    clock.start()
    exchanged = 0 if groups.tensor is None else -groups.tensor.total_bytes
    record = run_step(program, stages, device=CPU, clock=clock)
    exchanged += 0 if groups.tensor is None else groups.tensor.total_bytes
    written: Counter[str] = Counter()
    if rank not in idle_ranks(plan):
        for piece in to_write(pieces_of(prepared.stages), plan, place_of(plan, rank)):
            written[piece.name] += piece.box.count
    sends = [action for action in program.actions if action.kind == "SEND"]
    shared = [action for action in program.actions if action.kind not in ("SEND", "RECV")]
    return JobRankResult(
        parts=gradients.parts(),
        split=sum(place.shape != tuple(p.shape) for stage in prepared.stages for p, place in stage.places.items()),
        notes=tuple(notes),
        written=written,
        buffers={one.name: one.tensor for stage in prepared.stages for one in stage.buffers if one.writes},
        loss=0.0
        if groups.tensor is not None and groups.tensor.index
        else sum(loss for stage in prepared.stages for loss in stage.losses().values()),
        moved_bytes={
            "sent": record.activation_bytes + record.gradient_bytes,
            "shared": record.reduce_bytes,
            "exchanged": exchanged,
        },
        planned_bytes={
            "sent": sum(a.bytes for a in sends),
            "shared": sum(a.bytes for a in shared),
            "exchanged": sum(stage.foreseen_bytes() or 0 for stage in stages.values()),
        },
        ties=sum(action.kind == "TIE" for action in shared),
        postponed=postponed.gradients,
    )


def require_gradients(family: str, plan: Plan, results: Sequence[JobRankResult]) -> None:
    """Those of the model in one process, to 1e-5 of each gradient's largest element, in fp32; gradients that are zero
    but for rounding have the scale of a thousandth of the model's largest. Every element is there as often as on any
    other plan: at least once."""
    expected, loss = whole_job(family, plan)
    parts = {"vision": ("vision_tower",), "llm": ("language_model", "lm_head")}
    frozen = [module.name for module in plan.scenario.model.modules if module.training.mode == "frozen"]
    words = [word for name in frozen for word in parts[name]]
    expected = {key: value for key, value in expected.items() if not any(word in key for word in words)}
    least = max(gradient.abs().max() for gradient in expected.values()) / 1000
    seen: Counter[str] = Counter()
    for rank in results:
        for part in rank.parts:
            if part.name not in expected:
                assert not part.values.any(), part.name
                continue
            gradient = expected[part.name]
            at = tuple(slice(a, a + n) for a, n in zip(part.offset, part.values.shape, strict=True))
            error = (part.values - gradient[at]).abs().max() / gradient.abs().max().clamp_min(least)
            assert error < 1e-5, f"{part.name}: relative error {error:.1e}"
            seen[part.name] += part.values.numel()
    assert all(seen[key] >= gradient.numel() for key, gradient in expected.items())
    assert abs(sum(rank.loss for rank in results) - loss) <= 1e-5 * abs(loss)


def require_buffers(family: str, plan: Plan, results: Sequence[JobRankResult]) -> None:
    """Those of a process that has run the first replica's microbatches, each once."""
    one = replace(plan, dp=1)
    model = whole_model(family, one)[0]
    found = {name: buffer for rank in results for name, buffer in rank.buffers.items()}
    assert found.keys() == saved_buffers(model).keys()
    for name, buffer in saved_buffers(model).items():
        torch.testing.assert_close(found[name], buffer, msg=name)


def require_written_once(family: str, results: Sequence[JobRankResult]) -> None:
    """Of all elements that ranks hold, and of what the model saves beside its parameters."""
    written: Counter[str] = Counter()
    for rank in results:
        written += Counter(rank.written)
    model = job_of(family).model()
    held = {part.name for rank in results for part in rank.parts}
    expected = {key: p.numel() for key, p in model.named_parameters() if key in held}
    assert written == expected | {key: buffer.numel() for key, buffer in saved_buffers(model).items()}


@contextmanager
def job_process(rank: int, folder: str, processes: int = PROCESSES) -> Iterator[dict[str, Any]]:
    """One of them, that has run the plans that it is given: their results by name, to be added to."""
    with meeting(rank, folder, processes, timeout_s=90.0) as results:
        world = dist.new_group(range(processes))
        for name, (family, plan) in given_to(folder).items():
            results[name] = run_job_rank(family, plan, rank, world)
        yield results


class OwnBlocks(nn.Module):
    """A block whose pair can be split, and one like it with something more."""

    def __init__(self, more: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.block(nn.Tanh()), self.block(more)])

    @staticmethod
    def block(between: nn.Module) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), between, nn.Linear(12, 8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def splits_of(more: nn.Module, ranks: TensorRanks) -> tuple[list[str], tuple[str, ...]] | str:
    """Which blocks are split, and what is told of others; or why it is refused."""
    model = build_weightless(lambda: OwnBlocks(more))
    recorder = Recorder(model, find_units(model))
    recorder.record({"x": torch.randn(5, 8)})
    try:
        found = find_splits(recorder, find_units(model), ranks, CPU)
    except InputError as error:
        return str(error)
    return list(found.splits), found.whole


def run_job_cases(rank: int, folder: str) -> None:
    """Body of one of the four processes; writes its results to `folder`."""
    with job_process(rank, folder) as results:
        world, split = dist.new_group(range(PROCESSES)), given_to(folder)[SPLIT]
        for fault in FAULTS:
            with faulty(fault):
                results[fault] = run_job_rank(*split, rank, world)
        group = dist.new_group([0, 1])
        if rank < 2:
            ranks = TensorRanks(degree=2, index=rank, group=group)
            others = {
                "softmax": nn.Softmax(-1),
                "norm": nn.LayerNorm(12),
                "dropout": nn.Dropout(0.5),
                "convolution": nn.Conv1d(5, 5, 1),
            }
            results["splits"] = {name: splits_of(more, ranks) for name, more in others.items()}


def run_uneven_jobs(rank: int, folder: str) -> None:
    """The same of five, of these plans alone."""
    with job_process(rank, folder, MORE_PROCESSES):
        pass
