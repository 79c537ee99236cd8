"""Real models run in pieces, each with a part of the weights: loss and gradients equal those of the whole model."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from ghost_models import FAMILIES, Case, joined

from mmplan.errors import InputError
from mmplan.runtime.ghost.flow import Source
from mmplan.runtime.ghost.model import GhostModel, Pass
from mmplan.runtime.ghost.pretrained import Pretrained
from mmplan.runtime.ghost.recording import Recorder, Recording, loss_of
from mmplan.runtime.ghost.units import find_units, parameter_names
from mmplan.runtime.ghost.weightless import build_weightless, initial_value

CPU = torch.device("cpu")
CASES = {**FAMILIES, "joined": joined}


def value(name: str, like: Tensor) -> Tensor:
    found = initial_value(name, like, 0, torch.float32)
    return found if found.any() else torch.full_like(found, 0.02)  # zeros, as of gates, leave no gradients to compare


def whole(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the model as its authors run it."""
    build, batch = case
    model, bare = build(), build_weightless(build)
    for name, parameter in model.named_parameters():
        parameter.data = value(name, bare.get_parameter(name))
    loss = loss_of(model(**batch))
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


class Piecewise:
    """The model in `count` stages of consecutive calls; each stage has a copy with its own weights alone. What several
    stages read has a copy on each, whose gradients are summed."""

    def __init__(self, case: Case, count: int, dropped: Source | None = None) -> None:
        build, self.batch = case
        self.dropped = dropped
        models = [build_weightless(build) for _ in range(count)]
        self.recording = Recorder(models[0], find_units(models[0])).record(self.batch)
        order = list(dict.fromkeys(call.unit for call in self.recording.calls))
        ends = [len(order) * i // count for i in range(count + 1)]
        self.stage_of = {unit: stage for stage, (a, b) in enumerate(pairwise(ends)) for unit in order[a:b]}
        self.pieces = [{unit for unit, at in self.stage_of.items() if at == stage} for stage in range(count)]
        for call in (*self.recording.calls, self.recording.loss):
            self.pieces[self.stage_of.get(call.unit, count - 1)] |= call.parameters
        self.copies = [self.copy(model, stage) for stage, model in enumerate(models)]

    def copy(self, model: nn.Module, stage: int) -> GhostModel:
        pieces = self.pieces[stage]
        trained = frozenset(name for piece in pieces for name in parameter_names(model, piece))
        options = {"trained": trained, "weights": value, "device": CPU}
        return GhostModel(model, find_units(model), pieces=pieces, **options)

    def reads(self, stage: int) -> set[Source]:
        calls = [call for call in self.recording.calls if self.stage_of[call.unit] == stage]
        calls += [self.recording.loss] if stage == len(self.copies) - 1 else []
        return {s for call in calls for s in call.reads if self.stage_of[s.unit] != stage} - {self.dropped}

    def run(self) -> tuple[Tensor, dict[str, Tensor]]:
        sent: dict[Source, Tensor] = {}
        passes: list[tuple[Pass, Mapping[Source, Tensor]]] = []
        wanted = frozenset(source for stage in range(len(self.copies)) for source in self.reads(stage))
        for stage, copy in enumerate(self.copies):
            leaves = {s: sent[s].detach().requires_grad_(sent[s].requires_grad) for s in self.reads(stage)}
            work = Pass(
                recording=self.recording,
                own=frozenset(unit for unit, at in self.stage_of.items() if at == stage),
                recomputed=frozenset(),
                received={source: leaf.clone() for source, leaf in leaves.items()},
                sent=wanted,
                computes_loss=stage == len(self.copies) - 1,
            )
            copy.run(work, self.batch)
            sent |= work.outputs
            passes.append((work, leaves))
        back: dict[Source, Tensor] = {}
        for work, leaves in reversed(passes):
            roots = [s for s, output in work.outputs.items() if s in back and output.requires_grad]
            outputs = [work.outputs[s] for s in roots] + ([work.loss] if work.loss is not None else [])
            gradients = [back[s] for s in roots] + ([None] if work.loss is not None else [])
            if outputs:
                torch.autograd.backward(outputs, gradients)
            for source, leaf in leaves.items():
                if leaf.grad is not None:
                    back[source] = back[source] + leaf.grad if source in back else leaf.grad
        loss = passes[-1][0].loss
        assert loss is not None
        gradients_of: dict[str, Tensor] = {}
        for copy in self.copies:
            for name, parameter in copy.model.named_parameters():
                if parameter.grad is not None:
                    gradients_of[name] = gradients_of.get(name, torch.zeros(())) + parameter.grad
        return loss.detach(), gradients_of


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [2, 5])
def test_a_model_in_pieces_has_the_loss_and_the_gradients_of_the_whole(name: str, count: int) -> None:
    torch.manual_seed(1)
    case = CASES[name]()
    loss, gradients = whole(case)
    found_loss, found = Piecewise(case, count).run()
    assert torch.isclose(found_loss, loss, rtol=1e-6)
    trainable = {name for name, p in case[0]().named_parameters() if p.requires_grad}
    assert found.keys() & trainable == gradients.keys()
    for key, gradient in gradients.items():
        assert float((found[key] - gradient).abs().max()) <= 1e-6 * max(1.0, float(gradient.abs().max())), key


@pytest.mark.parametrize("name", CASES)
def test_an_edge_that_is_missed_turns_the_loss_into_nan(name: str) -> None:
    torch.manual_seed(1)
    case = CASES[name]()
    pieces = Piecewise(case, 4)
    for source in [source for stage in range(4) for source in sorted(pieces.reads(stage))][-4:]:
        found, _ = Piecewise(case, 4, dropped=source).run()
        assert torch.isnan(found), source


@pytest.mark.parametrize("name", CASES)
def test_a_recording_without_weights_has_the_shapes_of_a_real_forward(name: str) -> None:
    torch.manual_seed(1)
    build, batch = CASES[name]()
    model = build_weightless(build)
    recorder = Recorder(model, find_units(model))
    first, second = recorder.record(batch), recorder.record(batch)
    assert shapes_of(first) == shapes_of(second)  # the second took most blocks from the first
    real = build()
    seen: list[tuple[str, list[torch.Size]]] = []
    for unit, module in find_units(real).items():
        module.register_forward_hook(lambda _, __, output, unit=unit: seen.append((unit, tensor_shapes(output))))
    real(**batch)
    assert shapes_of(first) == seen


def shapes_of(recording: Recording) -> list[tuple[str, list[torch.Size]]]:
    return [(call.unit, tensor_shapes(call.output.leaves)) for call in recording.calls]


def tensor_shapes(value: object) -> list[torch.Size]:
    return [leaf.shape for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def by_item(x: Tensor) -> Tensor:
    return x * 2 if x.sum().item() > 0 else x


def by_branch(x: Tensor) -> Tensor:
    if x.sum() > 0:
        x = x * 2
    return x


def by_mask(x: Tensor) -> Tensor:
    return x[x > 0]


def by_positions(x: Tensor) -> Tensor:
    return x.flatten()[torch.nonzero(x.flatten() > 0)]


def by_loop(x: Tensor) -> Tensor:
    return x[:, : int(x.sum())]


class Peeking(nn.Module):
    """Its second block depends on a value that the first has computed."""

    def __init__(self, peek: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.peek = peek

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.peek(self.blocks[0](x)).sum() * torch.ones(4)).sum()


@pytest.mark.parametrize(
    ("peek", "word"),
    [
        *((by_item, "item"), (by_branch, "__bool__"), (by_loop, "__int__")),
        *((by_mask, "__getitem__"), (by_positions, "nonzero")),
    ],
)
def test_a_read_of_what_another_stage_computes_is_named_by_its_line(
    peek: Callable[[Tensor], Tensor], word: str
) -> None:
    model = build_weightless(lambda: Peeking(peek))
    told = (
        rf"test_ghost_execution\.py:\d+, in {peek.__name__}: `{word}` reads the value of a tensor that blocks\.0 comp"
    )
    with pytest.raises(InputError, match=told):
        Recorder(model, find_units(model)).record({"x": torch.randn(2, 4)})


def test_a_model_without_a_loss_is_refused() -> None:
    model = build_weightless(lambda: nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(InputError, match="has to return a loss"):
        Recorder(model, find_units(model)).record({"input": torch.randn(2, 4)})


def test_a_model_of_seven_billion_weights_is_recorded_without_memory() -> None:
    import transformers as hf

    config = hf.LlavaConfig()
    model = build_weightless(lambda: hf.LlavaForConditionalGeneration(config))
    assert sum(parameter.numel() for parameter in model.parameters()) > 7_000_000_000
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    ids = torch.randint(3, 90, (1, 600))
    ids[0, 1:577] = config.image_token_id
    batch = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 336, 336), "labels": ids, "use_cache": False}
    recording = Recorder(model, find_units(model)).record(batch)
    assert len(recording.calls) == len(find_units(model))


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_weights_reach_their_parameters(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    build, _ = FAMILIES[name]()
    real = build()
    real.save_pretrained(tmp_path, max_shard_size="60KB")  # several files; the library saves under older names
    model = build_weightless(build)
    pretrained = Pretrained(tmp_path, model)
    for key, parameter in model.named_parameters():
        assert torch.equal(pretrained.value(key, parameter), real.get_parameter(key)), key


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    FAMILIES["llava"]()[0]().save_pretrained(tmp_path)
    model = build_weightless(joined()[0])
    with pytest.raises(InputError, match=r"no tensor for the parameter 'left\.weight'"):
        Pretrained(tmp_path, model).value("left.weight", model.get_parameter("left.weight"))
    with pytest.raises(InputError, match="no safetensors files"):
        Pretrained(tmp_path.parent, model)
