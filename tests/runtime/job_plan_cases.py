"""Plans of real models whose gradients are compared with one process, and the code that its four processes run."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from adapted_models import RANK, TARGETS, adapted
from expert_families import EXPERT_FAMILIES
from ghost_models import FAMILIES, saved_config
from gradient_cases import in_precisions
from llava_job import batches as llava_batches
from tiny_plans import hand_plan, tiny_scenario
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.errors import InputError
from mmplan.planner.plan import Plan
from mmplan.planner.schedules.reschedule import refuse_unusable, with_family
from mmplan.planner.step_loads import part_size
from mmplan.runtime.checkpoint.pieces import pieces_of, to_write
from mmplan.runtime.clock import WallClock
from mmplan.runtime.executor import run_step
from mmplan.runtime.ghost.importing import record_job
from mmplan.runtime.ghost.job import Job, count_labels, load_job
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
from mmplan.scenario.formats.hf_config import read_hf_config
from mmplan.scenario.scenario import Dtype, Optimizer, Scenario, Training
from mmplan.scenario.schedule_names import ScheduleName
from mmplan.scenario.technique import ContextParallel

MODELS = FAMILIES | EXPERT_FAMILIES | {"adapted": adapted}
PROCESSES, PLANS = 4, "plans.pt"
STATISTICS = "running statistics in two stages, recomputed"
STEP_LENGTH = 2.0**20
PLAIN = Optimizer(name="sgd", learning_rate=STEP_LENGTH)
CPU = torch.device("cpu")


class HeadInGlue(nn.Module):
    """Gemma 3 as its authors do not run it: its own forward, not a unit of its own, reads the token table once more,
    and the scale of a norm in the first block of the tower."""

    def __init__(self) -> None:
        super().__init__()
        self.model = FAMILIES["gemma3"]()[0]().model

    def forward(self, labels: Tensor, **batch: Any) -> dict[str, Tensor]:
        states = self.model(**batch).last_hidden_state
        named = self.model.vision_tower.named_parameters()
        scale = next(p for name, p in named if name.endswith("layers.0.layer_norm1.weight"))
        logits = F.linear(states * scale.mean(), self.model.language_model.embed_tokens.weight)
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def job_of(family: str) -> Job:
    """The family's tiny model; batches of unlike content, those of LLaVA with no, one or two images."""

    if family in ("own", "normed"):
        return load_job(Path(__file__).parent / {"own": "own_model_job.py", "normed": "normed_job.py"}[family])

    def batches(size: int) -> Iterator[dict[str, Any]]:
        for index in count():
            torch.manual_seed(index)
            yield MODELS["gemma3" if family == "glue" else family]()[1]

    def model() -> nn.Module:
        return HeadInGlue() if family == "glue" else MODELS[family]()[0]()

    given = llava_batches if family == "llava" else batches
    return Job(file=Path(__file__), model=model, batches=given, weight=count_labels)


def scenario_of(family: str, folder: Path) -> Scenario:
    """What a user writes for the config of the model."""
    config = saved_config(job_of(family).model(), folder)
    return replace(tiny_scenario(), model=read_hf_config(config), global_batch=4, optimizer=PLAIN)


def recorded_scenario(family: str) -> Scenario:
    """What `mmplan import job` makes of the model."""
    with patch("mmplan.runtime.ghost.importing.MOST_SAMPLES", 3):
        model, _ = record_job(job_of(family))
    return replace(tiny_scenario(), model=model, global_batch=4, optimizer=PLAIN)


def cut(scenario: Scenario, *ends: str, dp: int = 1, samples: int = 1, **changes: Any) -> Plan:
    """Stages that end with these layers, and the rest; `changes`: of the plan, `recompute` of its stages."""
    layers = [layer.id for layer in build_graph(scenario).layers()]
    places = [0, *(layers.index(end) + 1 for end in ends), len(layers)]
    stages = [layers[first:end] for first, end in pairwise(places)]
    plan = hand_plan(scenario, stages, dp=dp, microbatch_size=samples)
    recompute = changes.pop("recompute", "none")
    return replace(plan, stages=tuple(replace(stage, recompute=recompute) for stage in plan.stages), **changes)


def chunks(plan: Plan) -> Plan:
    """Two stages on each rank."""
    return scheduled(plan, "interleaved")


def scheduled(plan: Plan, family: ScheduleName) -> Plan:
    costs = AnalyticCostModel(plan.scenario)
    return refuse_unusable(with_family(plan, family, build_graph(plan.scenario), costs))


def job_plans(folder: Path) -> dict[str, tuple[str, Plan]]:
    """Name -> family and plan."""
    llava, gemma, deep, mllama = (scenario_of(name, folder) for name in ("llava", "gemma3", "qwen3_vl", "mllama"))
    qwen, still = scenario_of("qwen2_5_vl", folder), with_training(llava, "llm", "frozen")
    audio, in_turn = scenario_of("qwen2_audio", folder), {"spread": ("vision", "projector")}
    frozen, zero_3 = with_training(llava, "vision", "frozen"), {"dp": 2, "sharding": "parameters"}
    low = with_training(llava, "llm", "lora", rank=RANK, targets=TARGETS)
    own, speech, sound, normed = (recorded_scenario(name) for name in ("own", "whisper", "qwen2_audio", "normed"))
    return {
        "LLaVA, ZeRO-3": ("llava", cut(llava, dp=4, sharding="parameters")),
        "LLaVA in two stages, ZeRO-2": ("llava", cut(llava, "llm.0", dp=2, sharding="gradients")),
        "LLaVA in two stages, ZeRO-3, recomputed": ("llava", cut(llava, "llm.0", recompute="full", **zero_3)),
        "Gemma 3, tied, ZeRO-3": ("gemma3", cut(gemma, dp=4, sharding="parameters")),
        "Gemma 3, tied over stages": ("gemma3", cut(gemma, "llm.0", dp=2)),
        "Gemma 3, tied over stages, ZeRO-3": ("gemma3", cut(gemma, "llm.0", **zero_3)),
        "a head in glue, ZeRO-3": ("glue", cut(gemma, "llm.0", **zero_3)),
        "Gemma 3, tied over four stages": ("gemma3", cut(gemma, "projector.0", "llm.embed", "llm.1")),
        "Gemma 3, tied over chunks": ("gemma3", chunks(cut(gemma, "llm.0", dp=2))),
        "two shared sets over chunks": ("glue", chunks(cut(gemma, "llm.0", dp=2))),
        "LLaVA in two stages, tensor parallel, attention recomputed": (
            "llava",
            cut(llava, "llm.0", tp=2, recompute="selective"),
        ),
        "LLaVA in two stages, tensor parallel, split backwards": (
            "llava",
            scheduled(cut(llava, "llm.0", tp=2), "zb-h1"),
        ),
        "LLaVA in two stages, rows, split backwards": ("llava", scheduled(cut(llava, "llm.0", cp=2), "zb-h1")),
        "images in turn, tensor parallel, split backwards": (
            "llava",
            scheduled(cut(llava, "llm.0", tp=2, **in_turn), "zb-h1"),
        ),
        "LLaVA, four tensor-parallel ranks": ("llava", cut(llava, tp=4)),
        "frozen tower, tensor parallel, ZeRO-3": ("llava", cut(frozen, tp=2, **zero_3)),
        "Gemma 3, tied over stages, tensor parallel": ("gemma3", cut(gemma, "llm.0", tp=2)),
        "DeepStack, tensor parallel, ZeRO-3": ("qwen3_vl", cut(deep, tp=2, **zero_3)),
        "cross-attention, tensor parallel, ZeRO-3, recomputed": (
            "mllama",
            cut(mllama, tp=2, recompute="full", **zero_3),
        ),
        "LLaVA in two stages, rows, ZeRO-3": ("llava", cut(llava, "llm.0", cp=2, sharding="parameters")),
        "frozen tower, rows on four ranks": ("llava", cut(frozen, cp=4)),
        "Gemma 3, tied over stages, rows": ("gemma3", cut(gemma, "llm.0", cp=2)),
        "a head in glue, rows, ZeRO-1": ("glue", cut(gemma, dp=2, cp=2, sharding="optimizer")),
        "Qwen2.5-VL, rows, recomputed": ("qwen2_5_vl", cut(qwen, dp=2, cp=2, recompute="full")),
        "DeepStack in two stages, rows": ("qwen3_vl", cut(deep, "llm.0", cp=2)),
        "frozen language model in two stages, rows": (
            "llava",
            cut(still, "llm.0", cp=2),
        ),
        "frozen language model in two stages, tensor parallel": (
            "llava",
            cut(still, "llm.0", tp=2),
        ),
        "LLaVA, rows for heads, recomputed": ("llava", cut(going(llava, "all-to-all"), dp=2, cp=2, recompute="full")),
        "Gemma 3 in two stages, rows for heads": ("gemma3", cut(going(gemma, "all-to-all"), "llm.0", cp=2)),
        "Gemma 3 in two stages, rows gathered": ("gemma3", cut(going(gemma, "gather"), "llm.0", cp=2)),
        "Qwen2.5-VL, rows gathered, recomputed": ("qwen2_5_vl", cut(going(qwen, "gather"), cp=4, recompute="full")),
        "Gemma 3, rows, tensor parallel": ("gemma3", cut(gemma, cp=2, tp=2)),
        "cross-attention, rows, tensor parallel, ZeRO-3, recomputed": (
            "mllama",
            cut(mllama, cp=2, tp=2, recompute="full", sharding="parameters"),
        ),
        "LLaVA in two stages, images in turn": ("llava", cut(llava, "llm.0", tp=2, **in_turn)),
        "cut inside the tower, images in turn, ZeRO-3, recomputed": (
            "llava",
            cut(llava, "vision.0", tp=2, sharding="parameters", recompute="full", **in_turn),
        ),
        "frozen tower, images in turn on four ranks": ("llava", cut(frozen, tp=4, **in_turn)),
        "Qwen2.5-VL, images in turn, rows, tensor parallel": ("qwen2_5_vl", cut(qwen, cp=2, tp=2, **in_turn)),
        "Qwen2-Audio, clips in turn, ZeRO-2": (
            "qwen2_audio",
            cut(audio, dp=2, tp=2, sharding="gradients", spread=("audio", "projector")),
        ),
        "own model as recorded, in two stages": ("own", cut(own, "blocks.0", dp=2, recompute="full")),
        "own model as recorded, in four stages": ("own", cut(own, "bridge.0", "blocks.0", "blocks.2")),
        STATISTICS: ("normed", cut(normed, "blocks.0", dp=2, recompute="full")),
        "Whisper as recorded, tied over stages, ZeRO-3": ("whisper", cut(speech, "decoder.1", **zero_3)),
        "Qwen2-Audio as recorded, in two stages": ("qwen2_audio", cut(sound, "language_model.1", dp=2)),
        "a tower in bf16, in two stages, ZeRO-1": (
            "llava",
            cut(typed(llava, vision="bf16"), "llm.0", dp=2, sharding="optimizer"),
        ),
        "a tower in bf16, cut inside, ZeRO-3, recomputed": (
            "llava",
            cut(typed(llava, vision="bf16"), "vision.0", recompute="full", **zero_3),
        ),
        "an encoder as recorded in bf16": ("own", cut(typed(own, eye="bf16"), "blocks.0", dp=2)),
        "adapters in two stages": ("adapted", cut(low, "llm.0", dp=2)),
        "adapters, ZeRO-3": ("adapted", cut(low, dp=4, sharding="parameters")),
        "adapters, tensor parallel, ZeRO-2": ("adapted", cut(low, dp=2, tp=2, sharding="gradients")),
        "cross-attention, rows, ZeRO-3, recomputed": ("mllama", cut(mllama, cp=2, recompute="full", **zero_3)),
    }


def going(scenario: Scenario, way: ContextParallel) -> Scenario:
    """Keys and values of rows on several ranks come together so."""
    return replace(scenario, technique=replace(scenario.technique, context_parallel=way))


def typed(scenario: Scenario, **precisions: Dtype) -> Scenario:
    """These modules in types of their own, the others in fp32."""
    names = (module.name for module in scenario.model.modules)
    return in_precisions(scenario, **{name: precisions.get(name, "fp32") for name in names})


def with_training(scenario: Scenario, module: str, mode: Any, **more: Any) -> Scenario:
    modules = tuple(
        replace(part, training=Training(mode=mode, **more)) if part.name == module else part
        for part in scenario.model.modules
    )
    return replace(scenario, model=replace(scenario.model, modules=modules))


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
class Part:
    """A box of a parameter's gradient: the first element in the whole parameter, the values."""

    name: str
    offset: tuple[int, ...]
    gradient: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRankResult:
    parts: Sequence[Part]
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
    held = [(stage.places[one.parameter], one) for stage in prepared.stages for one in stage.state.held()]
    before = [one.tensors["weight"].clone() for _, one in held]
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
        parts=[
            Part(name=place.name, offset=box.offset, gradient=(weight - one.tensors["weight"])[inside] / STEP_LENGTH)
            for (place, one), weight in zip(held, before, strict=True)
            for box, inside in place.boxes(one.box)
        ],
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
                assert not part.gradient.any(), part.name
                continue
            gradient = expected[part.name]
            at = tuple(slice(a, a + n) for a, n in zip(part.offset, part.gradient.shape, strict=True))
            error = (part.gradient - gradient[at]).abs().max() / gradient.abs().max().clamp_min(least)
            assert error < 1e-5, f"{part.name}: relative error {error:.1e}"
            seen[part.name] += part.gradient.numel()
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
def four_processes(rank: int, folder: str) -> Iterator[dict[str, Any]]:
    """One of them, that has run the plans in the folder: their results by name, which it saves in the end."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES, timeout=timedelta(seconds=90))
    plans = torch.load(Path(folder) / PLANS, weights_only=False)
    results, world = dict[str, Any](), dist.new_group(range(PROCESSES))
    for name, (family, plan) in plans.items():
        results[name] = run_job_rank(family, plan, rank, world)
    yield results
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


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
    with four_processes(rank, folder) as results:
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
