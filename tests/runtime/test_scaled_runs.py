"""Runs in fp16: gradients under scales of their own are those of one process, and overflows cost steps, not runs."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from case_processes import run_on_ranks
from checkpoint_cases import LLAVA_TWO_STAGES, tiny
from ghost_models import llava, saved_config
from job_plan_cases import cut, job_of, scenario_of
from safetensors.torch import load_file
from scaled_cases import (
    ALIKE,
    OVERFLOWING,
    PROCESSES,
    QUIET,
    STEPS,
    Overflowing,
    in_16_bits,
    plans,
    run_scaled_cases,
)
from tiny_plans import hand_plan
from torch import Tensor

from mmplan.cost_models.build import build_graph
from mmplan.errors import InputError
from mmplan.planner.plan import Plan
from mmplan.runtime.checkpoint.folder import read_manifest
from mmplan.runtime.ghost.train import JobGroups, prepare_job
from mmplan.runtime.ghost.weightless import build_weightless, initial_value
from mmplan.runtime.model import MultimodalModel
from mmplan.runtime.numerics.part_scales import GUILTY, SEEN, TAINTED, part_scales
from mmplan.runtime.places import Place
from mmplan.runtime.train import step_data, step_microbatches
from mmplan.scenario.formats.hf_config import read_hf_config

distributed = pytest.mark.distributed
CPU = torch.device("cpu")
KINDS = plans()
ONE = KINDS["one process"]
Weights = dict[str, Tensor]  # by the parameter's name in checkpoints


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scaled")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    config = saved_config(llava()[0](), folder)
    scenario = in_16_bits(replace(tiny(), model=read_hf_config(config)))
    jobs = {
        "replicas": hand_plan(scenario, LLAVA_TWO_STAGES, dp=2),
        "tensor parallel": replace(hand_plan(scenario, LLAVA_TWO_STAGES), tp=2),
    }
    measured: dict[str, Any] = run_on_ranks(run_scaled_cases, PROCESSES, folder, (KINDS, jobs))[0]
    return measured


def saved_weights(checkpoint: Path) -> Weights:
    """Whole ones, put together from all files."""
    manifest, files = read_manifest(checkpoint), {}
    for file in checkpoint.glob("*.safetensors"):
        files |= load_file(file)
    weights = {name: torch.zeros(saved.shape) for name, saved in manifest.tensors.items()}
    for name, saved in manifest.tensors.items():
        for _, offset, shape in saved.pieces:
            place = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
            weights[name][place] = files[f"{name}:weight@{','.join(map(str, offset))}"].float()
    return weights


def plain(plan: Plan, scale: float) -> tuple[Weights, Weights]:
    """First weights of the model, and the gradient of a step in a plain loop over its microbatches."""
    graph = build_graph(plan.scenario)
    layers = list(graph.layers())
    precision, seed = plan.scenario.precision, plan.scenario.seed
    model = MultimodalModel(layers, graph, precision=precision, seed=seed, device=CPU)
    names = {
        parameter: f"{layer.id}/{name}"
        for layer in layers
        for name, parameter in model.layer(layer.id).named_parameters()
    }
    gradients = {name: torch.zeros(parameter.shape) for parameter, name in names.items()}
    for batch in step_microbatches(plan, step_data(plan, 0), Place(0, 0, 0), {"vision", "audio", "llm"}, CPU):
        torch.stack(list(model(batch).values())).sum().mul(scale).backward()
        for parameter, name in names.items():
            if parameter.grad is not None:
                gradients[name] += parameter.grad.float() / scale
                parameter.grad = None
    return {name: parameter.detach().float() for parameter, name in names.items()}, gradients


def worst_error(found: Weights, expected: Weights) -> float:
    """Of all modules the largest relative error of their gradient."""
    wrong, size = defaultdict[str, float](float), defaultdict[str, float](float)
    for name, gradient in expected.items():
        module = name.split(".")[0] if "/" in name else ".".join(name.split(".")[:2])
        wrong[module] += float((found[name] - gradient).square().sum())
        size[module] += float(gradient.square().sum())
    return max((wrong[module] / size[module]) ** 0.5 for module in wrong if size[module])


def updates(before: Weights, checkpoint: Path) -> Weights:
    after = saved_weights(checkpoint)
    assert after.keys() == before.keys()
    return {name: weight - after[name] for name, weight in before.items()}


@distributed
@pytest.mark.usefixtures("results")
def test_one_process_has_the_gradients_of_a_plain_loop(folder: Path) -> None:
    before, expected = plain(ONE, ALIKE["text"])
    assert worst_error(updates(before, folder / "alike" / "step-00000001"), expected) < 1e-5


@distributed
@pytest.mark.usefixtures("results")
@pytest.mark.parametrize("name", KINDS)
def test_gradients_under_scales_of_their_own_are_those_of_one_process(name: str, folder: Path) -> None:
    """But for rounding in 16 bits; a scale that is wrong by its least, a factor of two, doubles gradients."""
    before, expected = plain(replace(ONE, scenario=KINDS[name].scenario), ALIKE["text"])
    assert worst_error(updates(before, folder / name / "step-00000001"), expected) < 3e-3
    manifest = read_manifest(folder / name / "step-00000001")
    assert {part: one.quiet_steps for part, one in manifest.loss_scales.items()} == dict.fromkeys(
        ("vision", "audio", "text"), 1
    )


@distributed
@pytest.mark.usefixtures("results")
@pytest.mark.parametrize("sharding", ["none", "parameters", "tensor parallel"])
def test_so_are_those_of_a_job_of_ones_own(sharding: str, folder: Path) -> None:
    seed = KINDS["one process"].scenario.seed
    model = build_weightless(lambda: llava()[0](), seed)
    before = {n: initial_value(n, p, seed, torch.float16).float() for n, p in model.named_parameters()}
    one, other = (updates(before, folder / kind / "step-00000001") for kind in ("job, alike", f"job, {sharding}"))
    assert worst_error(other, one) < 3e-3
    assert read_manifest(folder / f"job, {sharding}" / "step-00000001").loss_scales.keys() == {
        "vision",
        "text",
        "shared",
    }


def test_a_parameter_used_in_a_unit_and_between_units_is_refused(tmp_path: Path) -> None:
    """A token table that is a unit's, and that the model's own forward reads once more as its head."""
    plan = cut(in_16_bits(scenario_of("gemma3", tmp_path)))
    alone = JobGroups(replicas=None, tensor=None, more=lambda ranks: None)
    message = (
        r"embed_tokens.weight' is used in text and between units: under loss scales of modalities its gradient would "
        r"have two; train in bf16 \(`precision: bf16`\)"
    )
    with pytest.raises(InputError, match=message):
        prepare_job(plan, job_of("glue"), 0, CPU, alone, print)


@distributed
def test_what_compression_has_not_said_follows_the_scales(results: dict[str, Any]) -> None:
    """Scales that double every third step, and scales that stay: powers of two, which change no other digit."""
    growing, steady = (results[f"compressed, {quiet}"] for quiet in (QUIET, 2 * STEPS))
    assert growing.steps[-1].loss_scales["text"] >= 4 * growing.steps[0].loss_scales["text"]
    assert steady.steps[-1].loss_scales == steady.steps[0].loss_scales
    assert not any(step.skipped for run in (growing, steady) for step in run.steps)
    for one, other in zip(growing.steps, steady.steps, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=1e-4)


@distributed
@pytest.mark.parametrize("name", OVERFLOWING)
def test_the_modality_that_overflows_backs_off_alone_and_its_steps_are_told(name: str, results: dict[str, Any]) -> None:
    case: Overflowing = results[name]
    steps = case.unbroken.steps
    skipped = [step.index for step in steps if step.skipped]
    assert 0 < len(skipped) < STEPS and skipped[0] == 0 and all(step.losses for step in steps)
    assert steps[-1].loss_scales["vision"] < steps[0].loss_scales["vision"]
    for before, step in pairwise(steps):
        factor = {part: step.loss_scales[part] / scale for part, scale in before.loss_scales.items()}
        assert factor["vision"] == 0.5 if before.skipped else factor["vision"] in (1.0, 2.0)
        assert factor["audio"] >= 1.0 and factor["text"] >= 1.0
    told = [note for note in case.notes if "the step is left out, no weight has changed" in note]
    assert len(told) == len(skipped)
    assert all("; the loss scale of 'vision' falls to " in note for note in told)
    losses = [step.losses["llm"] for step in steps]
    assert losses[-1] < losses[0] - 0.3


@distributed
@pytest.mark.parametrize("name", OVERFLOWING)
def test_scales_and_training_go_on_to_the_bit_behind_a_checkpoint(
    name: str, results: dict[str, Any], folder: Path
) -> None:
    case: Overflowing = results[name]
    assert [s.losses for s in case.resumed.steps] == [s.losses for s in case.unbroken.steps]
    assert [s.loss_scales for s in case.resumed.steps] == [s.loss_scales for s in case.unbroken.steps]
    ends = [folder / f"{name}, {part}" / f"step-{STEPS:08}" for part in ("overflowing", "resumed")]
    first, again = (saved_weights(end) for end in ends)
    assert all(weight.equal(again[key]) for key, weight in first.items())
    one, other = (read_manifest(end) for end in ends)
    assert one.loss_scales == other.loss_scales and one.updates == other.updates < STEPS


def test_what_came_from_elsewhere_is_not_a_parts_own_fault_on_any_rank() -> None:
    """Vision's rank sees infinities come out of text; that they had come into text, another rank saw."""
    scales = part_scales(("vision", "text", "shared"))
    flags = torch.zeros(3, 5)
    flags[0, [SEEN, TAINTED]] = 1
    flags[1, [SEEN, GUILTY, TAINTED]] = 1
    flags[2, [SEEN, GUILTY]] = 1
    assert scales.move(flags) == {"shared": 2.0**15}
    flags[2, TAINTED] = 1  # a ring
    assert scales.move(flags).keys() == {"text", "shared"}
