"""What `gpu_check.py` measures on one device, part by part; each returns its rows."""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from measured import ROOT
from runtime import copy_beside_products, seconds_per_action

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import parameters
from mmplan.errors import InfeasibleError
from mmplan.planner.plan import Plan, save_plan
from mmplan.planner.search import optimize
from mmplan.report.utilisation import plan_utilisation
from mmplan.runtime.launch import execute
from mmplan.runtime.measurement import Measurement, load_run, save_run
from mmplan.runtime.recorded_steps import recorded_steps
from mmplan.runtime.refine import refine
from mmplan.runtime.reprice import reprice
from mmplan.runtime.validate import validate
from mmplan.scenario.catalogue import catalogue_device, catalogue_link
from mmplan.scenario.load import load_scenario
from mmplan.scenario.profile import load_profile, profile_device, save_profile
from mmplan.scenario.scenario import Scenario
from mmplan.units import format_bytes

# Where the driver's name is unknown: a device of the same generation, by compute capability (NVIDIA, CUDA C++ guide).
_BY_CAPABILITY = {(8, 0): "a100-sxm-80", (8, 6): "a10", (8, 9): "l40s", (9, 0): "h100-sxm", (10, 0): "b200"}
_TIMEOUT_S = 60.0  # of a communication: nothing here rightly waits longer
_LOSS_TOLERANCE = 0.02  # of 16 bits against 32 on the first step, before anything is learned
_MOST_TIMING = 0.01  # of an action
_LAYERS = (36, 24, 16, 10, 6)  # of the language model: 3.0, 2.1, 1.6, 1.2 and 0.9 billion parameters in all
_STATE_BYTES = 18  # of a parameter: bf16 weight, fp32 gradient, master copy and two moments


class NotMeasuredError(Exception):
    """Says in one sentence why a part cannot be done here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """`predicted` None: nothing says what it should be. `ok` None: nothing is demanded."""

    quantity: str
    measured: float
    predicted: float | None = None
    ok: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Here:
    """The device, and a folder that parts share; `kind`: cuda, or cpu to try the script itself."""

    kind: str
    name: str
    capability: tuple[int, int]
    free_bytes: int
    folder: Path

    @property
    def profile(self) -> Path:
        return self.folder / "device.profile.yaml"


def calibrate(here: Here) -> list[Row]:
    """Microbenchmarks in a process of their own, which gives all memory back."""
    command = [sys.executable, "-m", "mmplan", "calibrate", "--quick", "--device", here.kind, "-o", str(here.profile)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 and "--base" in done.stderr:
        base = _BY_CAPABILITY.get(here.capability, "h100-sxm")
        done = subprocess.run([*command, "--base", base], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or ["mmplan calibrate said nothing"])[-1])
    profile = load_profile(here.profile)
    base_device = catalogue_device(profile.base).device
    known = {f"attention.{kind}": value for kind, value in base_device.attention}
    return [
        Row(quantity=name, measured=item.value, predicted=known.get(name, getattr(base_device, name, None)))
        for name, item in profile.parameters.items()
    ]


def tiny(here: Here) -> list[Row]:
    """The tiny scenario on one process, and the same on the CPU in fp32: the loss is the same to begin with."""
    plan = _plan(_placed(_tiny(here), here, 1), 1)
    run = _run(plan, 1, 12)
    _keep(here, "tiny", plan, run)
    on_cpu = _run(_plan(load_scenario(ROOT / "scenarios" / "tiny.yaml"), 1), 1, 1)
    first, reference = run.steps[0].losses["llm"], on_cpu.steps[0].losses["llm"]
    same = abs(first / reference - 1) < _LOSS_TOLERANCE
    return [Row(quantity="first loss", measured=first, predicted=reference, ok=same), *_run_rows(plan, run)]


def shared(here: Here) -> list[Row]:
    """Two pipeline stages in two processes on the one device, over gloo through host memory."""
    plan = _plan(_placed(_tiny(here), here, 2), 2)
    run = _run(plan, 2, 8)
    _keep(here, "shared", plan, run)
    alone = _run(_plan(_placed(_tiny(here), here, 1), 1), 1, 1)
    first, reference = run.steps[0].losses["llm"], alone.steps[0].losses["llm"]
    same = abs(first / reference - 1) < _LOSS_TOLERANCE
    return [Row(quantity="first loss", measured=first, predicted=reference, ok=same), *_run_rows(plan, run)]


def ring(here: Here) -> list[Row]:
    """Rows of the language model on two processes that share the device and pass keys and values on, in 16 bits: the
    loss is that of one process on the CPU, and bytes are as predicted."""
    sys.path.insert(0, str(ROOT / "tests" / "runtime"))
    from tiny_plans import TWO_STAGES, hand_plan

    layers = tuple(layer for stage in TWO_STAGES for layer in stage)
    plan = replace(hand_plan(_placed(_tiny(here), here, 2), (layers,)), cp=2)
    run = _run(plan, 2, 8)
    alone = _run(hand_plan(load_scenario(ROOT / "scenarios" / "tiny.yaml"), (layers,)), 1, 1)
    first, reference = run.steps[0].losses["llm"], alone.steps[0].losses["llm"]
    same = abs(first / reference - 1) < _LOSS_TOLERANCE
    return [Row(quantity="first loss", measured=first, predicted=reference, ok=same), *_run_rows(plan, run)]


def executor(here: Here) -> list[Row]:
    """What an action costs beside its kernels, with the events that time it and without, and how much of a copy to the
    host, on the stream that sends, runs beside products."""
    tiny_run = here.folder / "tiny.json"
    if not tiny_run.exists():
        raise NotMeasuredError("the tiny model did not run, so there is no action to compare with")
    timed_s, untimed_s, timing_s = seconds_per_action(1, here.kind)
    forwards = [item for item in load_run(tiny_run).timeline if item.action.kind == "F"]
    action_s = statistics.median(item.end_s - item.start_s for item in forwards)
    share = timing_s / action_s
    rows = [
        Row(quantity="seconds of the host per action", measured=timed_s),
        Row(quantity="seconds of the host per action, untimed", measured=untimed_s),
        Row(quantity="timing over a forward of the tiny model", measured=share, ok=share < _MOST_TIMING),
    ]
    if here.kind == "cuda":
        rows.append(Row(quantity="part of a copy that runs beside products", measured=copy_beside_products()))
    return rows


def large(here: Here) -> list[Row]:
    """The largest model of 1 to 3 billion parameters that fits: training, prediction by the microbenchmarks, memory,
    and the prediction after the run has corrected the prices."""
    plan = _largest(here)
    run = _run(plan, 1, 5)
    _keep(here, "large", plan, run)
    profile = refine(plan, run, Path("large.json"))
    save_profile(profile, here.folder / "large.profile.yaml")
    after = reprice(plan, run, profile, here.folder / "large.profile.yaml", name="large", held_out=False)
    utilisation = plan_utilisation(plan, recorded_steps(plan, run).measured)
    rows = [Row(quantity="parameters", measured=_parameters(plan.scenario)), *_run_rows(plan, run)]
    rows.append(Row(quantity="step_time_s, calibrated by it", measured=run.step_time_s, predicted=after.after_s))
    return rows + ([] if utilisation is None else [Row(quantity="model FLOPs utilisation", measured=utilisation.mfu)])


def held_out(here: Here) -> list[Row]:
    """Another plan of the large scenario, recomputed, which the calibration has not seen."""
    profile_file = here.folder / "large.profile.yaml"
    if not profile_file.exists():
        raise NotMeasuredError("the large model did not run, so nothing is calibrated by it")
    plan = _largest(here, recompute="full")
    run = _run(plan, 1, 4)
    _keep(here, "held-out", plan, run)
    after = reprice(plan, run, load_profile(profile_file), profile_file, name="held out", held_out=True)
    rows = _run_rows(plan, run)
    rows.append(Row(quantity="step_time_s, calibrated by another", measured=run.step_time_s, predicted=after.after_s))
    return rows


def job(here: Here) -> list[Row]:
    """A model of transformers, unedited, two stages in two processes: the losses are those of the CPU."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise NotMeasuredError("transformers is not installed") from None
    sys.path.insert(0, str(ROOT / "tests" / "runtime"))
    from ghost_models import llava
    from tiny_plans import hand_plan

    from mmplan.scenario.formats.hf_config import read_hf_config

    tower, llm = ("vision.embed", "vision.0-2", "projector.0"), ("llm.embed", "llm.0-2", "llm.head", "llm.loss")
    config = here.folder / "config.json"
    config.write_text(json.dumps(llava()[0]().config.to_dict() | {"tie_word_embeddings": False}))
    scenario = load_scenario(ROOT / "scenarios" / "tiny.yaml")
    scenario = replace(scenario, model=read_hf_config(config), global_batch=4)
    script, stages = ROOT / "tests" / "runtime" / "llava_job.py", (tower, llm)
    on_cpu = execute(hand_plan(scenario, stages), local=2, steps=3, job=script, timeout_s=_TIMEOUT_S)
    plan = hand_plan(_placed(scenario, here, 2), stages)
    run = execute(plan, local=2, steps=3, job=script, share_devices=True, timeout_s=_TIMEOUT_S)
    assert run is not None and on_cpu is not None
    rows = []
    for mine, reference in zip(run.steps, on_cpu.steps, strict=True):
        measured, expected = mine.losses["llm"], reference.losses["llm"]
        near = abs(measured / expected - 1) < _LOSS_TOLERANCE
        rows.append(Row(quantity=f"loss of step {mine.index}", measured=measured, predicted=expected, ok=near))
    return rows


def kernels(here: Here) -> list[Row]:
    """Each kernel as a fraction of what the device reaches in copies or products; wrong if it is not its reference."""
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels.py"), "--quick", "--json", "--device", here.kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not told:
        raise RuntimeError((done.stderr.strip().splitlines() or ["benchmarks/kernels.py said nothing"])[-1])
    return [
        Row(
            quantity=f"{entry['operator']}, {entry['case']}: {_kernel_quantity(entry['status'])}",
            measured=float(entry["fraction_of_roof"] or 0),
            ok=entry["status"] == "done",
        )
        for entry in told
        if entry["implementation"] == "mmplan"
    ]


def _kernel_quantity(status: str) -> str:
    return "fraction of roof" if status == "done" else f"fraction of roof, {status}"


# Name -> what is done, and the most seconds it may take; together less than 8 minutes.
PARTS: dict[str, tuple[Callable[[Here], list[Row]], int]] = {
    "calibrate": (calibrate, 80),
    "tiny": (tiny, 60),
    "shared": (shared, 70),
    "ring": (ring, 50),
    "executor": (executor, 30),
    "large": (large, 110),
    "held-out": (held_out, 80),
    "job": (job, 70),
    "kernels": (kernels, 100),
}


def _tiny(here: Here) -> Scenario:
    """In 16 bits on a GPU: flash attention takes no fp32, and the model is to be the one that is planned."""
    scenario = load_scenario(ROOT / "scenarios" / "tiny.yaml")
    return replace(scenario, precision="bf16") if here.kind == "cuda" else scenario


def _placed(scenario: Scenario, here: Here, devices: int) -> Scenario:
    """On so many devices as calibrated, or processes that share it: all over loopback, each with its part of memory."""
    device = profile_device(load_profile(here.profile), "gpu check")
    device = replace(device, memory_bytes=min(device.memory_bytes, here.free_bytes // devices))
    link, pool = catalogue_link("loopback"), scenario.cluster.pools[0]
    pool = replace(pool, device=device, nodes=1, devices_per_node=devices, node_link=link)
    return replace(scenario, cluster=replace(scenario.cluster, pools=(pool,), network_link=link))


def _plan(scenario: Scenario, pp: int, recompute: str = "none") -> Plan:
    constraints = replace(scenario.constraints, pp=(pp,), dp=(1,), tp=(1,), recompute=(recompute,))
    return optimize(replace(scenario, constraints=constraints), time_limit_s=10).plan


def _largest(here: Here, recompute: str = "none") -> Plan:
    scenario = _placed(load_scenario(ROOT / "benchmarks" / "gpu-check.yaml"), here, 1)
    if here.kind == "cpu":  # to try the script: the same shape, a thousandth of the size
        scenario = replace(_placed(load_scenario(ROOT / "scenarios" / "tiny.yaml"), here, 1), global_batch=4)
    for layers in _LAYERS if here.kind == "cuda" else (6,):
        modules = tuple(
            replace(m, transformer=replace(m.transformer, layers=layers)) if m.kind == "language_model" else m
            for m in scenario.model.modules
        )
        sized = replace(scenario, model=replace(scenario.model, modules=modules))
        if _STATE_BYTES * _parameters(sized) > here.free_bytes:
            continue  # to be told so by the search takes seconds
        try:
            return _plan(sized, 1, recompute)
        except InfeasibleError:
            continue
    raise NotMeasuredError(f"a model of 0.9 billion parameters needs more than {format_bytes(here.free_bytes)}")


def _run(plan: Plan, processes: int, steps: int) -> Measurement:
    several = processes > 1
    timeout_s = _TIMEOUT_S if several else None  # alone a process waits for nobody, and may build its weights in peace
    run = execute(plan, steps=steps, local=processes, share_devices=several, timeout_s=timeout_s)
    assert run is not None
    return run


def _keep(here: Here, name: str, plan: Plan, run: Measurement) -> None:
    save_plan(plan, here.folder / f"{name}.plan.json")
    save_run(run, here.folder / f"{name}.json")


def _run_rows(plan: Plan, run: Measurement) -> list[Row]:
    """Times and memory without demand; bytes exact; the loss has to fall."""
    validation = validate(plan, run)
    found, last = validation.decomposition, run.steps[-1].losses["llm"]
    rows = [Row(quantity="last loss over first", measured=last / run.steps[0].losses["llm"], predicted=1.0)]
    rows = [replace(row, ok=row.measured < 1.0) for row in rows]
    for name in ("step_time_s", "bubble", "overlap"):
        row = next(row for row in validation.rows if row.quantity == name and row.rank is None)
        rows.append(Row(quantity=name, measured=row.measured, predicted=row.planned))
    for part in ("compute_s", "bubble_s", "communication_s", "other_s"):
        rows.append(Row(quantity=f"difference by {part}", measured=getattr(found, part)))
    for entry in validation.rows:
        if entry.quantity == "peak_memory_bytes":
            name = f"peak memory of rank {entry.rank}"
            rows.append(Row(quantity=name, measured=entry.measured, predicted=entry.planned))
        elif entry.quantity in ("sent_bytes", "reduce_bytes", "tensor_bytes") and entry.rank is None and entry.planned:
            exact = entry.passed is not False
            rows.append(Row(quantity=entry.quantity, measured=entry.measured, predicted=entry.planned, ok=exact))
    return rows


def _parameters(scenario: Scenario) -> float:
    return float(sum(parameters(layer) for layer in build_graph(scenario).layers()))


def facts_command() -> Sequence[str]:
    """Prints what torch says of the first CUDA device, or of none; in a process of its own, so that this one holds no
    memory of the device."""
    return (sys.executable, "-c", _FACTS)


_FACTS = """
import json, torch
found = {"torch": torch.__version__, "cuda": str(torch.version.cuda or torch.version.hip), "name": ""}
try:
    import triton
    found["triton"] = triton.__version__
except ImportError:
    found["triton"] = ""
if torch.cuda.is_available():
    free, total = torch.cuda.mem_get_info()
    found |= {"name": torch.cuda.get_device_name(0), "free": free, "total": total}
    found["capability"] = list(torch.cuda.get_device_capability(0))
print(json.dumps(found))
"""


def facts() -> dict[str, object]:
    """Raises RuntimeError where torch itself fails."""
    done = subprocess.run(facts_command(), capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or ["torch said nothing"])[-1])
    found: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
