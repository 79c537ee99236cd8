"""Modules in the order in which tokens flow through them."""

from mmplan.errors import CostModelError
from mmplan.scenario.scenario import Model, ModelModule


def upstream_first(model: Model) -> tuple[ModelModule, ...]:
    """Every module after all that feed it, else as they stand in the model.

    Raises:
        CostModelError: modules feed each other in a circle.
    """
    order: list[ModelModule] = []
    waiting = list(model.modules)
    while waiting:
        blocked = {edge.consumer for edge in model.edges if edge.producer in {module.name for module in waiting}}
        ready = [module for module in waiting if module.name not in blocked]
        if not ready:
            raise CostModelError(f"modules feed each other in a circle: {', '.join(m.name for m in waiting)}")
        order += ready
        waiting = [module for module in waiting if module.name in blocked]
    return tuple(order)
