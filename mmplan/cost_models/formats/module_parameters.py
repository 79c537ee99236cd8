"""Parameters of a model's modules, without a scenario around it."""

from mmplan.cost_models.build import model_layers
from mmplan.cost_models.counts import parameters
from mmplan.scenario.scenario import Model


def module_parameters(model: Model) -> dict[str, int]:
    """Module -> parameters of all its layers; a matrix that table and head share counts once."""
    counts = {module.name: 0 for module in model.modules}
    for layer in model_layers(model):
        counts[layer.module] += parameters(layer)
    return counts
