"""Models of transformers as they are recorded beside what the planner makes of their configs, layer by layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ghost_models import Case
from tiny_plans import tiny_scenario

from mmplan.cost_models.build import build_graph, model_layers
from mmplan.cost_models.counts import dgrad_flops, forward_flops, kept_bytes, parameters, wgrad_flops
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.load import Loads
from mmplan.cost_models.loads import summed_loads
from mmplan.runtime.ghost.alignment import align
from mmplan.runtime.ghost.counting import Counting
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
    """Of one layer."""

    parameters: int = 0
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    kept_bytes: int = 0

    def __add__(self, other: "Numbers") -> "Numbers":
        return Numbers(
            parameters=self.parameters + other.parameters,
            forward_flops=self.forward_flops + other.forward_flops,
            backward_flops=self.backward_flops + other.backward_flops,
            kept_bytes=self.kept_bytes + other.kept_bytes,
        )


def compared(case: Case, samples: Sequence[Sample], config: Path) -> dict[str, tuple[Numbers, Numbers]]:
    """Layer of the config -> as derived from it, and as recorded. All is trained."""
    build, batch = case
    planned = read_hf_config(config)
    model = build_weightless(build)
    dtype = next(model.parameters()).dtype
    recording = Recorder(model, find_units(model), Counting(model, dtype)).record(batch)
    recorded = model_from_recordings("recorded", model, [recording], len(samples), {})
    graph = build_graph(replace(tiny_scenario(), model=planned))
    layer_of = align(graph, model, [recording])
    loss = next(layer.id for layer in reversed(graph.layers()) if layer.kind == "loss")
    found = dict.fromkeys((layer.id for layer in graph.layers()), Numbers())
    for layer in model_layers(recorded):
        at = layer_of[layer.pieces[-1]] if layer.pieces else loss
        found[at] += _numbers(layer, summed_loads(recorded, samples))
    loads = summed_loads(planned, samples)
    return {layer.id: (_numbers(layer, loads), found[layer.id]) for layer in graph.layers()}


def _numbers(layer: Layer, loads: Loads) -> Numbers:
    load = loads[layer.module]
    return Numbers(
        parameters=parameters(layer),
        forward_flops=forward_flops(layer, load),
        backward_flops=dgrad_flops(layer, load) + wgrad_flops(layer, load),
        kept_bytes=kept_bytes(layer, load, "fp32"),
    )
