"""Bytes of single layers under a scenario's technique, as plans count them: additive over layers and microbatches.

The rules are those of `mmplan fit` (`memory_activations.py`, `memory_states.py`). Under mmplan's own technique they
give `counts.kept_bytes` and `memory.state_bytes`. What a layer needs at work beside what it keeps is in neither: it
comes out of `Device.reserved_bytes` and the headroom, and `mmplan fit` shows it.
"""

import math

from mmplan.cost_models.layer import Layer
from mmplan.cost_models.load import Load
from mmplan.cost_models.memory_activations import BLOCKS, Setting, kept, kept_recomputed, logits_bytes
from mmplan.cost_models.memory_states import Replicas, layer_counts, state_parts
from mmplan.cost_models.shard import Shard
from mmplan.scenario.scenario import Scenario

_WHOLE = Replicas(dense=1, expert=1)


def planned_state_bytes(layer: Layer, scenario: Scenario, tp: int = 1) -> int:
    """Bytes of a layer's weights, gradients and optimizer state on each rank; a tied head counts as a copy."""
    counts = layer_counts(layer, Shard(tp=tp))
    parts = state_parts(counts, _WHOLE, scenario.precision, scenario.optimizer, scenario.technique)
    return sum(part.bytes for part in parts)


def planned_kept_bytes(layer: Layer, load: Load, scenario: Scenario, tp: int = 1) -> int:
    """Bytes that a layer keeps of a microbatch from its forward to its backward, on each rank."""
    technique = scenario.technique
    setting = Setting(precision=scenario.precision, technique=technique, shard=Shard(tp=tp))
    if layer.kind == "loss":
        return math.ceil(logits_bytes(layer, load, setting, _hidden(scenario))[0]) if layer.has_backward else 0
    if technique.recompute == "full" and layer.kind in BLOCKS:
        return math.ceil(kept_recomputed(layer, load, setting).total)
    return math.ceil(kept(layer, load, setting).total)


def _hidden(scenario: Scenario) -> int:
    modules = scenario.model.modules
    return max((m.transformer.hidden for m in modules if m.kind == "language_model" and m.transformer), default=0)
