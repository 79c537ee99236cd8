"""A model on another device than the CPU, which every machine has: `meta`. Nothing may mix host and device there.

torch itself lets some operators take indices of the host beside tensors of `meta`; a GPU refuses them. Here all are
refused: what passes has every operand on the device, or takes it there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from expert_models import DEEPSEEK, text_only
from layer_zoo import FROZEN, FULL, LLM, LORA_QV, llava, microbatch_of, mllama, omni, qwen_vl, scenario_of
from tiny_plans import TWO_STAGES, hand_plan, tiny_scenario
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmplan.cost_models.build import build_graph
from mmplan.planner.lower import lower
from mmplan.runtime.batch import make_microbatch
from mmplan.runtime.executor import run_step
from mmplan.runtime.model import MultimodalModel
from mmplan.runtime.places import Place
from mmplan.runtime.train import build_stages, step_data, step_microbatches
from mmplan.scenario.attention_forms import GatedDelta
from mmplan.scenario.catalogue import catalogue_device
from mmplan.scenario.scenario import Model, Sample

META = torch.device("meta")
MODELS: dict[str, Model] = {
    "llava": llava(FROZEN, FULL, LORA_QV),
    "qwen_vl": qwen_vl(FULL, FULL, FULL),
    "mllama": mllama(FULL, FULL, FULL),
    "omni": omni(FULL, FULL, FULL),
    "latent attention": text_only(replace(DEEPSEEK, moe=None)),
    "sliding windows": text_only(replace(LLM, window_tokens=4, sliding=True, post_norms=True, qk_norm=True)),
    "linear attention": text_only(
        replace(LLM, delta=GatedDelta(key_heads=2, value_heads=4, key_dim=6, value_dim=8, conv=4))
    ),
    "short convolution": text_only(replace(LLM, short_conv=3, out_gate="head")),
}  # experts count rows on the host, which `meta` has none of


class OneDevice(TorchDispatchMode):
    """Refuses operators with operands on host and device; scalars may lie on the host, and copies go between them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim() > 0]
        devices = {operand.device.type for operand in operands}
        assert len(devices) < 2 or func is torch.ops.aten.copy_.default, f"{func} of tensors on {sorted(devices)}"
        return func(*args, **(kwargs or {}))


@contextmanager
def one_device() -> Iterator[None]:
    with OneDevice():
        yield


def test_a_mixture_is_noticed() -> None:
    with one_device(), pytest.raises(AssertionError, match=r"index_select.* of tensors on \['cpu', 'meta'\]"):
        torch.empty(3, 4, device=META).index_select(0, torch.tensor([0]))


SAMPLES = (
    Sample(text_tokens=5, images=((8, 8), (6, 18)), audio_s=(1.1, 0.3), speech_tokens=3),
    Sample(text_tokens=11, images=((13, 9),), audio_s=(0.5,), speech_tokens=9),
)


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_computes_where_its_weights_are(name: str) -> None:
    scenario = scenario_of(MODELS[name], "bf16")
    graph, on_host = build_graph(scenario), microbatch_of(scenario, SAMPLES)
    batch = make_microbatch(
        scenario,
        SAMPLES,
        indices=range(len(SAMPLES)),
        targets_in_batch=on_host.targets_in_batch,
        raw_modules=list(on_host.inputs),
        dtype=torch.bfloat16,
        device=META,
    )
    model = MultimodalModel(graph.layers(), graph, precision="bf16", seed=1, device=META)
    with one_device():
        losses = model(batch)
        assert losses and all(loss.device == META for loss in losses.values())
        sum(losses.values(), torch.zeros((), device=META)).backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trained and all(p.grad is None or p.grad.device == META for p in trained)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_whole_step_stays_on_its_device(recompute: Any) -> None:
    """Two microbatches through one stage, 16 bits with master copies, updated."""
    scenario = replace(tiny_scenario(), precision="bf16", global_batch=2)
    pool = replace(scenario.cluster.pools[0], device=catalogue_device("h200").device)
    scenario = replace(scenario, cluster=replace(scenario.cluster, pools=(pool,)))
    plan = hand_plan(scenario, ((*TWO_STAGES[0], *TWO_STAGES[1]),))
    plan = replace(plan, stages=tuple(replace(stage, recompute=recompute) for stage in plan.stages))
    graph, data = build_graph(scenario), step_data(plan, 0)
    stages = build_stages(plan, graph, 0, META)
    for stage in stages.values():
        stage.load(step_microbatches(plan, data, Place(0, 0, 0), stage.raw_modules, META))
    with one_device():
        record = run_step(lower(plan, graph, data.loads).ranks[0], stages, device=META, clock=StoppedClock())
    assert [str(action) for action, *_ in record.marks] == ["0F0", "0B0", "0F1", "0B1", "0STEP"]
    assert {parameter.device for parameter in stages[0].model.parameters()} == {META}


class StoppedClock:
    def start(self) -> None:
        pass

    def mark(self) -> object:
        return 0.0

    def stop(self) -> None:
        pass

    def seconds(self, mark: object) -> float:
        return 0.0
