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
    like = [other.producer for other in model.edges if (other.kind, other.consumer) == ("merge", edge.consumer)]
    kind = model.module(encoder).kind
    like = [name for name in like if model.module(_encoder_of(model, name)).kind == kind]
    if len(like) == 1:  # two towers that see the same images
        return like[0]
    raise ValueError(
        f"'{edge.producer}' adds to tokens of '{encoder}', and no edge merges those into '{edge.consumer}'"
    )


def _encoder_of(model: Model, name: str) -> str:
    """The module itself, or the one that feeds the projectors in front of it."""
    while model.module(name).kind in ("projector", "encoder"):
        name = next(edge.producer for edge in model.edges if edge.consumer == name)
    return name
