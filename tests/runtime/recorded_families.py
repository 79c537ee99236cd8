"""Models of transformers as they are recorded beside what the planner makes of their configs, layer by layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ghost_models import Case
from tiny_plans import tiny_scenario

from mmplan.cost_models.build import build_graph, model_layers
from mmplan.cost_models.counts import (
    dgrad_flops,
    forward_flops,
    is_tied,
    kept_bytes,
    op_parameters,
    wgrad_flops,
)
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.load import Loads
from mmplan.cost_models.loads import summed_loads
from mmplan.cost_models.local_layer import backward_sum_bytes, forward_sum_bytes
from mmplan.runtime.ghost.alignment import align
from mmplan.runtime.ghost.counting import Counting
from mmplan.runtime.ghost.importing import blocks_on_ranks
from mmplan.runtime.ghost.recorded_model import model_from_recordings
from mmplan.runtime.ghost.recording import Recorder
from mmplan.runtime.ghost.units import find_units
from mmplan.runtime.ghost.weightless import build_weightless
from mmplan.scenario.formats.hf_config import read_hf_config
from mmplan.scenario.scenario import Sample

SQUARE, WIDE = (16, 16), (16, 32)
# What the batches of `ghost_models.py` hold; text tokens are those beside images and clips.
SAMPLES: Mapping[str, Sequence[Sample]] = {
    "llava": [Sample(text_tokens=24, images=(SQUARE,))] * 2,
    **{
        name: [Sample(text_tokens=26, images=(SQUARE,)), Sample(text_tokens=22, images=(WIDE,))]
        for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
    },
    "qwen2_audio": [Sample(text_tokens=30, audio_s=(0.4,))] * 2,
    "mllama": [Sample(text_tokens=20, images=(SQUARE,))] * 2,
    "gemma3": [Sample(text_tokens=20, images=(SQUARE,))] * 2,
    "whisper": [Sample(text_tokens=12, audio_s=(0.4,))] * 2,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """Of one layer on a rank; `summed_bytes`: that it hands to sums over tensor-parallel ranks in both passes."""

    parameters: int = 0
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    kept_bytes: int = 0
    summed_bytes: int = 0

    def __add__(self, other: "Numbers") -> "Numbers":
        return Numbers(
            parameters=self.parameters + other.parameters,
            forward_flops=self.forward_flops + other.forward_flops,
            backward_flops=self.backward_flops + other.backward_flops,
            kept_bytes=self.kept_bytes + other.kept_bytes,
            summed_bytes=self.summed_bytes + other.summed_bytes,
        )


Compared = dict[str, tuple[Numbers, Numbers]]


def compared(case: Case, samples: Sequence[Sample], config: Path) -> Compared:
    """Layer of the config -> as derived from it, and as recorded. All is trained."""
    return compared_on_ranks(case, samples, config, ())[1]


def compared_on_ranks(
    case: Case, samples: Sequence[Sample], config: Path, degrees: Sequence[int]
) -> dict[int, Compared]:
    """The same on each of so many tensor-parallel ranks; 1 is always among them."""
    build, batch = case
    planned = read_hf_config(config)
    model = build_weightless(build)
    dtype = next(model.parameters()).dtype
    shared = blocks_on_ranks(model, [batch], degrees)
    recording = Recorder(model, find_units(model), Counting(model, dtype, shared)).record(batch)
    recorded = model_from_recordings("recorded", model, [recording], len(samples), {}, shared)
    graph = build_graph(replace(tiny_scenario(), model=planned))
    layer_of = align(graph, model, [recording])
    loss = next(layer.id for layer in reversed(graph.layers()) if layer.kind == "loss")
    loads, of_recorded = summed_loads(planned, samples), summed_loads(recorded, samples)
    on_ranks = {}
    for tp in (1, *degrees):
        found = dict.fromkeys((layer.id for layer in graph.layers()), Numbers())
        for layer in model_layers(recorded):
            at = layer_of[layer.pieces[-1]] if layer.pieces else loss
            found[at] += _numbers(layer, of_recorded, tp)
        on_ranks[tp] = {layer.id: (_numbers(layer, loads, tp), found[layer.id]) for layer in graph.layers()}
    return on_ranks


def _numbers(layer: Layer, loads: Loads, tp: int) -> Numbers:
    load = loads[layer.module]
    return Numbers(
        parameters=sum(op_parameters(op, tp) for op in layer.ops if not is_tied(op)),
        forward_flops=forward_flops(layer, load, tp),
        backward_flops=dgrad_flops(layer, load, tp) + wgrad_flops(layer, load, tp),
        kept_bytes=kept_bytes(layer, load, "fp32", tp),
        summed_bytes=forward_sum_bytes(layer, load, "fp32", tp) + backward_sum_bytes(layer, load, "fp32", tp),
    )
