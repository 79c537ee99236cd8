"""What an edge of a model implies about other edges."""

from mmplan.scenario.scenario import Model, ModelEdge


def merged_beside(model: Model, edge: ModelEdge) -> str:
    """The module that merges the same encoder's tokens into the language model that an `add` edge leads to.

    Raises:
        ValueError: there is none, so nothing says where the tokens lie.
    """
    encoder = _encoder_of(model, edge.producer)
    for other in model.edges:
        if other.kind == "merge" and other.consumer == edge.consumer and _encoder_of(model, other.producer) == encoder:
            return other.producer
    raise ValueError(
        f"'{edge.producer}' adds to tokens of '{encoder}', and no edge merges those into '{edge.consumer}'"
    )


def _encoder_of(model: Model, name: str) -> str:
    """The module itself, or the one that feeds it when it is a projector."""
    if model.module(name).projector is None:
        return name
    return next(edge.producer for edge in model.edges if edge.consumer == name)
