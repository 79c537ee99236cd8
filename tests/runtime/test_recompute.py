"""Recomputed blocks: what they keep is what plans count, gradients are those of blocks that keep everything."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from layer_zoo import FROZEN, FULL, LORA_QV, llava, microbatch_of, mllama, omni, qwen_vl, scenario_of
from tiny_plans import TWO_STAGES, hand_plan, tiny_scenario
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.layout import RECOMPUTE_LEVELS, Layout, RecomputeLevel
from mmplan.cost_models.loads import sample_loads
from mmplan.cost_models.memory_activations import BLOCKS
from mmplan.cost_models.ops import Rope
from mmplan.cost_models.planned_memory import planned_kept_bytes
from mmplan.errors import InputError
from mmplan.planner.lower import lower
from mmplan.planner.plan import Plan
from mmplan.planner.schedules.reschedule import refuse_unusable, with_family
from mmplan.runtime.attention import rope_table
from mmplan.runtime.batch import Microbatch
from mmplan.runtime.ghost.attention_again import recompute_attention
from mmplan.runtime.layers import build_layer
from mmplan.runtime.places import Place
from mmplan.runtime.recompute import recomputed
from mmplan.runtime.requirements import process_count
from mmplan.runtime.train import build_stages, step_data, step_microbatches
from mmplan.scenario.scenario import Model, Sample
from mmplan.scenario.technique import Sharding

CPU = torch.device("cpu")
SAMPLES = (
    Sample(text_tokens=5, images=((8, 8), (6, 18)), audio_s=(1.1, 0.3), speech_tokens=3),
    Sample(text_tokens=11, images=((13, 9),), audio_s=(0.5,), speech_tokens=9),
)
MODELS: dict[str, Callable[..., Model]] = {"llava": llava, "qwen_vl": qwen_vl, "mllama": mllama, "omni": omni}
MODES = {"full": (FULL, FULL, FULL), "frozen encoder, LoRA": (FROZEN, FULL, LORA_QV), "encoder": (FULL, FROZEN, FROZEN)}


class _Run:
    """One forward and backward of a layer: bytes that autograd kept between them, and all gradients."""

    def __init__(self, layer: Layer, module: nn.Module, inputs: dict[str, Tensor], batch: Microbatch, again: bool):
        kept: dict[int, int] = {}
        weights = {p.untyped_storage().data_ptr() for p in module.parameters()} | _tables(layer, batch)

        def keep(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in weights:
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        leaves = {
            source.producer: inputs[source.producer].clone().requires_grad_(source.value in layer.grad_values)
            for source in layer.sources
        }
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            self.output = recomputed(module, leaves, batch) if again else module(leaves, batch)
        self.kept_bytes = sum(kept.values())
        if self.output.requires_grad:
            module.zero_grad()
            self.output.square().sum().backward()
        self.gradients = [p.grad for p in (*module.parameters(), *leaves.values()) if p.grad is not None]


def _tables(layer: Layer, batch: Microbatch) -> set[int]:
    """Addresses of the rotary tables that blocks share."""
    turns = {op.dims or op.x.width // op.heads for op in layer.ops if isinstance(op, Rope)}
    tables = [rope_table(batch.lengths[layer.module], width, torch.float32, CPU) for width in turns]
    return {table.untyped_storage().data_ptr() for pair in tables for table in pair}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_a_recomputed_block_keeps_what_plans_count_and_has_equal_gradients(name: str, mode: str) -> None:
    model = MODELS[name](*MODES[mode])
    scenario, seen = scenario_of(model, samples=SAMPLES), 0
    graph, loads, batch = build_graph(scenario), sample_loads(scenario, SAMPLES), microbatch_of(scenario, SAMPLES)
    outputs: dict[str, Tensor] = {}
    for layer in graph.layers():
        module = build_layer(layer)
        inputs = {source.producer: outputs[source.producer] for source in layer.sources}
        outputs[layer.id] = module(inputs, batch).detach()
        if layer.kind not in BLOCKS or not layer.has_backward:
            continue
        seen += 1
        plain = _Run(layer, module, inputs, batch, False)
        for level in ("full", "selective"):
            module.drops_attention = level == "selective"
            again, layout = _Run(layer, module, inputs, batch, level == "full"), Layout(recompute=level)
            assert again.kept_bytes == planned_kept_bytes(layer, loads[layer.module], scenario, layout), level
            assert again.kept_bytes < plain.kept_bytes
            assert torch.equal(plain.output, again.output)
            assert len(plain.gradients) == len(again.gradients) > 0
            assert all(torch.equal(a, b) for a, b in zip(plain.gradients, again.gradients, strict=True))
    assert seen > 0


def _recomputing(level: RecomputeLevel) -> Plan:
    plan = hand_plan(replace(tiny_scenario(), global_batch=2), TWO_STAGES)
    return replace(plan, stages=tuple(replace(stage, recompute=level) for stage in plan.stages))


@pytest.mark.parametrize("level", RECOMPUTE_LEVELS)
def test_a_stage_keeps_what_its_level_of_recomputation_says(level: RecomputeLevel) -> None:
    """Counted beside that: one number of the cross entropy, and rotary tables, which blocks that keep more than their
    input share."""
    plan = _recomputing(level)
    graph, data = build_graph(plan.scenario), step_data(plan, 0)
    stage, layers = build_stages(plan, graph, 1, CPU)[1], [graph.layer(layer) for layer in plan.stages[1].layers]
    batches = step_microbatches(plan, data, Place(0, 0, 0), stage.raw_modules, CPU)
    stage.load(batches)
    receives = [action for action in lower(plan, graph, data.loads).ranks[1].actions if action.kind == "RECV"]
    before = stage.memory_bytes()
    stage.forward(0, {a.tensor: torch.zeros(a.bytes, dtype=torch.uint8) for a in receives if a.microbatch == 0})
    load = data.loads[0][0]
    planned = sum(planned_kept_bytes(layer, load[layer.module], plan.scenario, plan.layout(1)) for layer in layers)
    kept = any(layer.kind in BLOCKS and plan.layout(1).recomputed(layer) != "full" for layer in layers)
    tables = rope_table(batches[0].lengths["llm"], 32, torch.float32, CPU) if kept else ()
    beside = sum(table.untyped_storage().nbytes() for table in tables) + 4
    assert stage.memory_bytes() - before == planned + beside


SPLIT = ("0F0 0I0 0W0 0F1 0I1 0W1", "1F0 1B0 1F1 1B1")


def test_recomputation_and_split_backwards_are_not_executed_together() -> None:
    plan = _recomputing("half")
    assert process_count(plan, rehearse=False) == 2
    split = replace(plan, schedule="depth-first", orders=SPLIT)
    with pytest.raises(InputError, match=r"^stage 0 has recompute=half and split backwards, .*simulate PLAN --sch"):
        process_count(split, rehearse=False)
    assert process_count(split, rehearse=True) == 2
    first, second = split.stages
    assert process_count(replace(split, stages=(replace(first, recompute="none"), second)), rehearse=False) == 2


def test_attention_alone_is_not_recomputed_in_models_of_others_where_rows_of_others_are_read() -> None:
    plan = _recomputing("selective")
    assert process_count(plan, rehearse=False) == process_count(plan, rehearse=False, own_model=True) == 2
    assert process_count(replace(plan, cp=2), rehearse=False) == 4
    with pytest.raises(InputError, match=r"stage 0 has recompute=selective and cp=2, .*`constraints.cp: \[1\]`"):
        process_count(replace(plan, cp=2), rehearse=False, own_model=True)


class _Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2).contiguous() for part in self.qkv(x).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(attended.transpose(1, 2).flatten(2).contiguous())
        return result


def test_a_unit_of_others_drops_the_attention_that_it_asks_torch_for() -> None:
    """Its result [1, 4 heads, 10 rows, 8] and the log-sum-exp of each row and head, both in fp32."""
    torch.manual_seed(0)
    model, x, seen = _Attends(), torch.randn(1, 10, 32, requires_grad=True), []
    for again in (False, True):
        if again:
            recompute_attention(model)
        kept: dict[int, int] = {}

        def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            output = model(x)
        gradients = torch.autograd.grad(output.square().sum(), [x, *model.parameters()])
        seen.append((sum(kept.values()), output, gradients))
    (plain, expected, whole), (dropped, found, parts) = seen
    assert plain - dropped == 4 * 10 * (4 * 8 + 4)
    assert torch.equal(expected, found) and all(map(torch.equal, whole, parts))


@pytest.mark.parametrize("sharding", ["gradients", "parameters"])
def test_gradients_that_are_shared_layer_by_layer_and_split_backwards_are_not_executed_together(
    sharding: Sharding,
) -> None:
    plan = replace(_recomputing("none"), dp=2, microbatches=1, sharding=sharding)
    assert process_count(plan, rehearse=False) == 4
    split = replace(plan, schedule="depth-first", orders=SPLIT)
    with pytest.raises(InputError, match=f"^stage 0 has sharding={sharding} and split backwards"):
        process_count(split, rehearse=False)
    assert process_count(replace(split, sharding="optimizer"), rehearse=False) == 4


def test_planned_schedules_have_whole_backwards_where_gradients_are_sharded() -> None:
    plan = replace(hand_plan(replace(tiny_scenario(), global_batch=8), TWO_STAGES, dp=2), schedule="1f1b")
    graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
    split = refuse_unusable(with_family(plan, "depth-first", graph, costs))
    whole = refuse_unusable(with_family(replace(plan, sharding="parameters"), "depth-first", graph, costs))
    assert any("I" in order for order in split.orders)
    assert whole.orders and not any("I" in order for order in whole.orders)
