"""What a model of the user's own trains beside what the plan's adapters are."""

from collections import Counter
from collections.abc import Mapping

from torch import nn

from mmplan.cost_models.counts import trainable_parameters
from mmplan.cost_models.graph import ComputationGraph
from mmplan.errors import InputError
from mmplan.planner.plan import Plan
from mmplan.runtime.ghost.units import parameter_names


def refuse_adapters(plan: Plan, graph: ComputationGraph, model: nn.Module, layer_of: Mapping[str, str]) -> None:
    """InputError where the model trains more or less of a layer than the plan's adapters are."""
    adapters = {m.name: m.training for m in plan.scenario.model.modules if m.training.mode == "lora"}
    found = Counter[str]()
    for piece, layer in layer_of.items():
        own = (model.get_parameter(name) for name in parameter_names(model, piece))
        found[layer] += sum(parameter.numel() for parameter in own if parameter.requires_grad)
    for planned in (one for one in graph.layers() if one.module in adapters):
        wanted, training = trainable_parameters(planned), adapters[planned.module]
        if found[planned.id] != wanted:
            raise InputError(
                f"the plan trains {wanted:,} parameters of {planned.id} (LoRA, rank {training.rank} on "
                f"{', '.join(training.targets)}), the job's model {found[planned.id]:,}: put adapters of this rank "
                "into these linears in `model()`, and `requires_grad_(False)` on all else of the module"
            )
