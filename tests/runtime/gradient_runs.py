"""What four processes run of the pipelines of `gradient_cases.py`, and one process that has the whole model."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from case_processes import given_to, meeting
from gradient_cases import FAULTS, LEFT_OUT, NO_WEIGHTS, PROCESSES, STALE, TABLE_ON_TWO, WRONG_SCALE
from torch import Tensor

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.planned_memory import planned_state_bytes
from mmplan.cost_models.ties import table_of
from mmplan.planner.lower import lower
from mmplan.planner.plan import Plan
from mmplan.runtime.clock import WallClock
from mmplan.runtime.executor import run_step
from mmplan.runtime.groups import group_maker
from mmplan.runtime.model import MultimodalModel, module_path
from mmplan.runtime.network import all_reduce
from mmplan.runtime.places import Place, mesh_of_row
from mmplan.runtime.stage import LayerStage
from mmplan.runtime.train import build_stages, step_data, step_microbatches, tie_stages
from mmplan.runtime.weighted_stage import WeightedStage
from mmplan.scenario.scenario import Optimizer

STEP_LENGTH = 2.0**20
CPU = torch.device("cpu")


def table_name(model: MultimodalModel, name: str) -> str:
    """The parameter's name in the whole model: of a copy of a token table that one's."""
    heads = {module_path(layer.id): table for layer in model._order if (table := table_of(layer)) is not None}
    path = name.removesuffix(".parts.head.weight")
    return f"{module_path(heads[path])}.parts.table.weight" if path in heads else name


def perturb(model: MultimodalModel) -> None:
    """Deterministic noise on every weight, so that LoRA's zero matrices do not hide gradients."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(table_name(model, name).encode()))
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """Gradients by parameter name, losses, and bytes of one rank: sent, given to collectives among replicas, and of
    state after the step; each with what was planned."""

    gradients: dict[str, Tensor]
    losses: dict[str, float]
    sent_bytes: int
    shared_bytes: int
    state_bytes: int
    program_bytes: int
    program_shared_bytes: int
    planned_state_bytes: int


def whole_model(plan: Plan) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients, summed in fp32, and losses of one process that runs all microbatches of all replicas."""
    graph = build_graph(plan.scenario)
    model = MultimodalModel(graph.layers(), graph, precision="fp32", seed=plan.scenario.seed, device=CPU)
    perturb(model)
    data = step_data(plan, 0)
    raw_modules = [module.name for module in plan.scenario.model.modules if module.projector is None]
    losses, sums = dict[str, float](), dict[str, Tensor]()
    for replica in range(mesh_of_row(plan, 0).dp):
        for batch in step_microbatches(plan, data, Place(0, replica, 0), raw_modules, CPU):
            parts = model(batch)
            torch.stack([loss.float() for loss in parts.values()]).sum().backward()
            for module, loss in parts.items():
                losses[module] = losses.get(module, 0.0) + loss.item()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    sums[name] = sums.get(name, 0) + parameter.grad.float()
                    parameter.grad = None
    return sums, losses


class _Perturbed(MultimodalModel):
    """Noisy before any rank takes its share."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        perturb(self)


def trained_weights(stage: LayerStage, layers: Sequence[str]) -> dict[str, Tensor]:
    """Trained weights by parameter name, whole on every replica."""
    names = {p: table_name(stage.model, name) for name, p in stage.model.named_parameters() if p.requires_grad}
    found = {}
    for layer in layers:
        stage.state.enter(layer, backward=False)
        own = [parameter for parameter in stage.model.layer(layer).parameters() if parameter in names]
        found |= {names[parameter]: parameter.detach().clone() for parameter in own}
        stage.state.leave(layer, backward=False)
    return found


def run_rank(plan: Plan, rank: int, replicas: dist.ProcessGroup | None, control: dist.ProcessGroup) -> RankResult:
    """One step of this rank's stages. Gradients are what plain gradient descent takes from weights, by steps so long
    that rounding of the weights hides nothing."""
    scenario = replace(plan.scenario, optimizer=Optimizer(name="sgd", learning_rate=STEP_LENGTH))
    plan, graph, data = replace(plan, scenario=scenario), build_graph(plan.scenario), step_data(plan, 0)
    program = lower(plan, graph, data.loads).ranks[rank]
    with patch("mmplan.runtime.train.MultimodalModel", _Perturbed):
        stages = build_stages(plan, graph, plan.row(program.stage), CPU, replicas=replicas)
    tie_stages(plan, graph, stages, group_maker(rank, "gloo", timedelta(seconds=30)))
    before: dict[str, Tensor] = {}
    for index, stage in stages.items():
        before |= trained_weights(stage, plan.stages[index].layers)
        stage.load(step_microbatches(plan, data, Place(0, program.replica, 0), stage.raw_modules, CPU))
    clock = WallClock(control, one_host=True)
    clock.start()
    record = run_step(program, stages, device=CPU, clock=clock)
    held_bytes = sum(stage.memory_bytes() for stage in stages.values())
    # plans count fp32 copies of 16-bit weights with AdamW alone; gradient descent has them too
    held_bytes -= sum(one._master_bytes for stage in stages.values() for one in stage.state.optimizers)
    layers = [graph.layer(layer) for index in stages for layer in plan.stages[index].layers]
    after = {
        name: w
        for index, stage in stages.items()
        for name, w in trained_weights(stage, plan.stages[index].layers).items()
    }
    return RankResult(
        gradients={name: (weight - after[name]) / STEP_LENGTH for name, weight in before.items()},
        losses={module: loss for stage in stages.values() for module, loss in stage.losses().items()},
        sent_bytes=record.activation_bytes + record.gradient_bytes,
        shared_bytes=record.reduce_bytes,
        state_bytes=held_bytes,
        program_bytes=sum(action.bytes for action in program.actions if action.kind == "SEND"),
        program_shared_bytes=sum(a.bytes for a in program.actions if a.kind not in ("SEND", "RECV")),
        planned_state_bytes=sum(planned_state_bytes(layer, scenario, plan.layout(program.stage)) for layer in layers),
    )


def _mean(x: Tensor, group: dist.ProcessGroup) -> None:
    """As DDP does, over replicas that have each a part of the sum."""
    all_reduce(x, group)
    x /= group.size()


def _but_for_one(stage: WeightedStage, microbatch: int) -> None:
    if microbatch != 1:
        WEIGHTS_OF(stage, microbatch)


def _stale(stage: LayerStage, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor is the first one of its name and size."""
    first = stage.__dict__.setdefault("first_of_size", {})
    kept = {name: first.setdefault((name, x.nbytes), x.clone()) for name, x in received.items()}
    return FORWARD_OF(stage, microbatch, kept)


FORWARD_OF, WEIGHTS_OF = LayerStage.forward, WeightedStage.backward_weight


def _faulty() -> dict[str, Any]:
    return {
        WRONG_SCALE: patch("mmplan.runtime.flat.all_reduce", _mean),
        NO_WEIGHTS: patch.object(WeightedStage, "backward_weight", _but_for_one),
        STALE: patch.object(LayerStage, "forward", _stale),
    }


def run_all_cases(rank: int, folder: str) -> None:
    """Body of one of the four processes, which get the plans."""
    plans: dict[str, Plan] = given_to(folder)
    with meeting(rank, folder, PROCESSES) as results:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        world = dist.new_group(range(PROCESSES))

        def run(name: str) -> RankResult:
            return run_rank(plans[name], rank, pairs[rank // 2] if plans[name].dp == 2 else None, world)

        results |= {name: run(name) for name in plans}
        with patch("mmplan.runtime.ties.all_reduce"):
            results[LEFT_OUT] = run(TABLE_ON_TWO)
        for fault, patched in _faulty().items():
            with patched:
                results[fault] = run(FAULTS[fault])
