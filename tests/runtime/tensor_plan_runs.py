"""What four processes run of the plans of `tensor_plan_cases.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist
from case_processes import given_to, meeting
from gradient_runs import CPU, perturb, table_name, trained_weights
from torch import Tensor

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layer import Layer
from mmplan.planner.lower import lower
from mmplan.planner.plan import Plan
from mmplan.planner.step_loads import drawn_step_loads
from mmplan.planner.tensor_traffic import tensor_bytes
from mmplan.runtime.ahead import Features, ahead_part
from mmplan.runtime.clock import WallClock
from mmplan.runtime.executor import run_step
from mmplan.runtime.groups import group_maker, replica_group, tensor_ranks
from mmplan.runtime.model import MultimodalModel
from mmplan.runtime.places import idle_program, listed_places, mesh_of_row, place_of, program_of_shard
from mmplan.runtime.stage import LayerStage
from mmplan.runtime.tensor_parallel import SplitLayer, name_in_whole, slice_of
from mmplan.runtime.tensor_sums import TensorRanks
from mmplan.runtime.train import build_stages, load_stages, step_data, tie_stages
from mmplan.scenario.scenario import Optimizer

STEP_LENGTH = 1e3  # so long that rounding of the weights hides nothing of their gradients


class PerturbedPart(MultimodalModel):
    """This rank's part of a model with noise on every weight."""

    def __init__(
        self,
        layers: Sequence[Layer],
        graph: ComputationGraph,
        *,
        precision: str,
        seed: int,
        device: torch.device,
        ranks: TensorRanks | None = None,
    ) -> None:
        super().__init__(layers, graph, precision=precision, seed=seed, device=device, ranks=ranks)
        whole = MultimodalModel(layers, graph, precision=precision, seed=seed, device=device)
        perturb(whole)
        weights = dict(whole.named_parameters())
        for name, parameter in self.named_parameters():
            own = weights[name_in_whole(name)].detach()
            parameter.data.copy_(slice_of(own, parameter.shape, *extent_in(self, name, own.shape)))


def extent_in(model: MultimodalModel, name: str, whole: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Where the rank's part of the whole model's parameter begins and ends."""
    _, layer, of_layer = name.split(".", 2)
    module = model.layers[layer]
    return module.extent(of_layer, whole) if isinstance(module, SplitLayer) else ((0,) * len(whole), whole)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRankResult:
    """Gradients by parameter name, losses and bytes of one rank."""

    index: int
    gradients: dict[str, Tensor]
    places: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    losses: dict[str, float]
    tensor_bytes: int
    planned_tensor_bytes: int
    sent_bytes: int
    planned_sent_bytes: int | None  # of ranks that the program lists


def run_tensor_rank(plan: Plan, rank: int, control: dist.ProcessGroup) -> TensorRankResult:
    """One step of plain gradient descent."""
    optimizer = Optimizer(name="sgd", learning_rate=STEP_LENGTH)
    plan = replace(plan, scenario=replace(plan.scenario, optimizer=optimizer))
    graph = build_graph(plan.scenario)
    timeout = timedelta(seconds=30)
    replicas = replica_group(plan, rank, "gloo", timeout)
    ranks = tensor_ranks(plan, rank, "gloo", timeout)
    if rank not in listed_places(plan):
        return _idle(rank, control)
    place, loads = place_of(plan, rank), drawn_step_loads(plan, 0)
    whole_program = lower(plan, graph, loads)
    listed = listed_places(plan)[rank]
    program = program_of_shard(plan, whole_program.ranks[listed], place.shard)
    with patch("mmplan.runtime.train.MultimodalModel", PerturbedPart):
        stages = build_stages(plan, graph, place.row, CPU, ranks, replicas)
    tie_stages(plan, graph, stages, group_maker(rank, "gloo", timeout))
    before: dict[str, Tensor] = {}
    for index, stage in stages.items():
        before |= trained_weights(stage, plan.stages[index].layers)
    clock = WallClock(control, one_host=True)
    clock.start()
    features = _features(plan, rank, 0, stages, clock)
    already_bytes = 0 if ranks is None else ranks.total_bytes
    load_stages(plan, stages, place, 0, CPU)
    record = run_step(program, stages, device=CPU, clock=clock, features=features)
    made_bytes = 0 if ranks is None else ranks.total_bytes - already_bytes
    losses = {module: loss for stage in stages.values() for module, loss in stage.losses().items()}
    _require_equal(features, _features(plan, rank, 1, stages, clock))
    sends = [action for action in whole_program.ranks[listed].actions if action.kind == "SEND"]
    after: dict[str, Tensor] = {}
    for index, stage in stages.items():
        after |= trained_weights(stage, plan.stages[index].layers)
    return TensorRankResult(
        index=place.shard % mesh_of_row(plan, place.row).tp,
        places={
            table_name(stage.model, name): (
                stage.places[parameter].offset,
                stage.places[parameter].limit or stage.places[parameter].shape,
            )
            for stage in stages.values()
            for name, parameter in stage.model.named_parameters()
            for place in (stage.places[parameter],)
        },
        gradients={name: (weight - after[name]) / STEP_LENGTH for name, weight in before.items()},
        losses=losses,
        tensor_bytes=made_bytes,
        planned_tensor_bytes=tensor_bytes(plan, graph, whole_program, loads)[listed],
        sent_bytes=record.activation_bytes + record.gradient_bytes,
        planned_sent_bytes=sum(a.bytes * a.copies for a in sends) if place.shard == 0 else None,
    )


def _features(plan: Plan, rank: int, step: int, stages: Mapping[int, LayerStage], clock: WallClock) -> Features:
    """What a rank has of a step's features before it begins."""
    features = Features()
    if plan.prefetch:
        place, loads = place_of(plan, rank), step_data(plan, step).loads
        listed = lower(plan, build_graph(plan.scenario), loads).ranks[listed_places(plan)[rank]]
        load_stages(plan, stages, place, step, CPU, ahead=0)
        part = ahead_part(plan, program_of_shard(plan, listed, place.shard))
        run_step(part, stages, device=CPU, clock=clock, features=features)
    return features


def _require_equal(made: Features, expected: Features) -> None:
    """What a step has made for the next one is what that would have made itself."""
    assert made.received.keys() == expected.received.keys()
    for key, messages in made.received.items():
        for (_, own), (_, other) in zip(messages, expected.received[key], strict=True):
            assert torch.equal(own.there(), other.there()), key


def _idle(rank: int, control: dist.ProcessGroup) -> TensorRankResult:
    """A step of a rank without a stage."""
    clock = WallClock(control, one_host=True)
    clock.start()
    record = run_step(idle_program(rank), {}, device=CPU, clock=clock)
    return TensorRankResult(
        index=0,
        gradients={},
        places={},
        losses={},
        tensor_bytes=0,
        planned_tensor_bytes=0,
        sent_bytes=record.activation_bytes + record.gradient_bytes,
        planned_sent_bytes=0,
    )


def run_tensor_cases(rank: int, folder: str) -> None:
    """Body of one of as many processes as the plans need, which they get."""
    plans: dict[str, Plan] = given_to(folder)
    processes = max(plan.rank_count for plan in plans.values())
    with meeting(rank, folder, processes) as results:
        world = dist.new_group(range(processes))
        results |= {name: run_tensor_rank(plan, rank, world) for name, plan in plans.items()}
