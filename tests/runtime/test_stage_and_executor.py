"""The executor's own refusals, and the optimizer and gradients of a stage, in one process."""

from collections.abc import Mapping
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from tiny_plans import hand_plan, tiny_scenario
from torch import Tensor, nn

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import parameters
from mmplan.cost_models.memory import state_bytes
from mmplan.errors import RunError
from mmplan.planner.lower import lower
from mmplan.planner.program import Action, ActionKind, RankProgram
from mmplan.runtime.executor import StepRecord, run_step
from mmplan.runtime.gradients import FlatGradients
from mmplan.runtime.network import Message
from mmplan.runtime.optimizer import StageOptimizer
from mmplan.runtime.places import Place
from mmplan.runtime.stage import Stage
from mmplan.runtime.train import build_stages, step_data, step_microbatches
from mmplan.scenario.scenario import Optimizer

CPU = torch.device("cpu")


class LocalClock:
    def start(self) -> None:
        pass

    def mark(self) -> object:
        return 0.0

    def stop(self) -> None:
        pass

    def seconds(self, mark: object) -> float:
        return 0.0


class OneTensorStage:
    """Makes one activation `a>b` of 12 bytes for every microbatch."""

    def forward(self, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"a>b": torch.ones(3)}

    def backward(self, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        raise ValueError("no such luck")

    def backward_input(self, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {}

    def backward_weight(self, microbatch: int) -> None:
        pass

    def reads(self, *, gradients: bool) -> tuple[str, ...]:
        return ()

    def reduce(self) -> None:
        pass

    def moved_bytes(self) -> int:
        return 0

    def step(self) -> None:
        pass

    def losses(self) -> dict[str, float]:
        return {}

    def memory_bytes(self) -> int:
        return 0


def run(*actions: Action, stage: Stage | None = None) -> StepRecord:
    program = RankProgram(rank=5, stage=0, replica=0, actions=actions)
    return run_step(program, {0: stage or OneTensorStage()}, device=CPU, clock=LocalClock())


def test_a_stage_that_makes_other_bytes_than_the_program_says_ends_the_run() -> None:
    with pytest.raises(RunError, match=r"0SEND0\[a>b\]@1: the stage made 12 bytes, the program says 16"):
        run(Action("F", 0, 0), Action("SEND", 0, 0, 1, "a>b", 16))


def test_sending_what_was_not_computed_ends_the_run() -> None:
    with pytest.raises(RunError, match="sends a>c, which its stage has not computed"):
        run(Action("F", 0, 0), Action("SEND", 0, 0, 1, "a>c", 12))


def test_a_tensor_that_the_program_never_sends_ends_the_run() -> None:
    with pytest.raises(RunError, match=r"rank 5 computed a>b of microbatch 0 and the program never sends it"):
        run(Action("F", 0, 0))


def test_the_next_microbatch_is_computed_while_the_last_ones_tensor_is_on_its_way() -> None:
    """A send is posted and left alone: nobody waits for it before the end of the step."""
    seen: list[str] = []

    class Slow:
        def wait(self) -> None:
            seen.append("waited")

        def is_completed(self) -> bool:
            return False

    class Noting(OneTensorStage):
        def forward(self, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
            seen.append(f"F{microbatch}")
            return {"a>b": torch.full((3,), float(microbatch))}

    sent: list[Tensor] = []

    def post(flat: Tensor, *_: object) -> Message:
        seen.append("sent")
        sent.append(flat)
        return Message(held=flat, device=CPU, work=Slow())  # type: ignore[arg-type]

    with patch("mmplan.runtime.executor.post_send", post):
        run(*(one for i in range(3) for one in (Action("F", 0, i), Action("SEND", 0, i, 1, "a>b", 12))), stage=Noting())
    assert seen == ["F0", "sent", "F1", "sent", "F2", "sent", "waited", "waited", "waited"]
    assert [flat.view(torch.float32).tolist() for flat in sent] == [[float(i)] * 3 for i in range(3)]  # kept meanwhile


@pytest.mark.parametrize("kind", ["F", "REDUCE", "STEP"])
def test_other_bytes_among_replicas_than_the_program_says_end_the_run(kind: ActionKind) -> None:
    message = "the stage gave 0 bytes to collectives among its replicas, the program says 8"
    with pytest.raises(RunError, match=message):
        run(Action(kind, 0, 0, bytes=8))


def test_an_error_in_a_stage_names_rank_and_action() -> None:
    with pytest.raises(RunError, match=r"^rank 5, action 0B3: ValueError: no such luck$"):
        run(Action("B", 0, 3))


def test_adamw_on_flat_gradients_is_torchs_adamw() -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(5, 3), nn.Linear(5, 3)
    twin.load_state_dict(model.state_dict())
    gradients = FlatGradients(model.parameters(), torch.float32)
    ours = StageOptimizer(gradients.parameters, gradients.views, Optimizer(learning_rate=0.1))
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4, 5)
        model(x).square().sum().backward()
        model(2 * x).square().sum().backward()
        ours.step()
        gradients.zero()
        theirs.zero_grad()
        (twin(x).square().sum() + twin(2 * x).square().sum()).backward()
        theirs.step()
        assert torch.allclose(model.weight, twin.weight, atol=1e-6), step


def test_sixteen_bit_weights_follow_an_fp32_master_copy() -> None:
    """Ten updates of 1e-4 on weights near 1: bf16 alone (spacing 2^-8) would stay at 1."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    gradients = FlatGradients(model.parameters(), torch.float32)
    settings = Optimizer(name="sgd", learning_rate=1e-3)
    optimizer = StageOptimizer(gradients.parameters, gradients.views, settings)
    for _ in range(10):
        model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        gradients.zero()
    assert model.weight.item() == pytest.approx(0.99, abs=2**-8)
    assert optimizer.memory_bytes() == 4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_stage_of_the_whole_model_holds_the_bytes_that_the_memory_model_counts(precision: str) -> None:
    scenario = replace(tiny_scenario(), global_batch=2, precision=precision)
    graph = build_graph(scenario)
    plan = hand_plan(tiny_scenario(), [[layer.id for layer in graph.layers()]])
    plan = replace(plan, scenario=scenario, microbatches=2)
    stage = build_stages(plan, graph, 0, CPU)[0]
    assert sum(p.numel() for p in stage.model.parameters()) == sum(parameters(layer) for layer in graph.layers())
    data = step_data(plan, 0)
    stage.load(step_microbatches(plan, data, Place(0, 0, 0), stage.raw_modules, CPU))
    expected = sum(state_bytes(layer, scenario.precision, scenario.optimizer) for layer in graph.layers())
    assert stage.memory_bytes() == expected  # from the first step on
    run(*lower(plan, graph, data.loads).ranks[0].actions, stage=stage)
    assert stage.memory_bytes() == expected
