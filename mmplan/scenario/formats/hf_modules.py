"""Parts that several Hugging Face families share: edges, projectors, mergers."""

from itertools import pairwise
from typing import Any, Literal

from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.scenario import EdgeKind, Modality, Model, ModelEdge, ModelModule, Projector
from mmplan.scenario.steps import Form, Steps

SOURCE = "structure: modelling code of transformers 5.24"


def edge(producer: str, consumer: str, kind: EdgeKind) -> ModelEdge:
    return ModelEdge(producer=producer, consumer=consumer, kind=kind)


def chain(name: str, *modules: ModelModule, last: EdgeKind = "merge") -> Model:
    """encoder -> projector -> ... -> language model."""
    edges = [edge(a.name, b.name, "input") for a, b in pairwise(modules[:-1])]
    return Model(name=name, modules=modules, edges=(*edges, edge(modules[-2].name, modules[-1].name, last)))


def merged(name: str, llm: ModelModule, *ways: tuple[ModelModule, ...]) -> Model:
    """Several ways of encoder, ..., projector into one language model."""
    inner = [edge(a.name, b.name, "input") for way in ways for a, b in pairwise(way)]
    ends = [edge(way[-1].name, llm.name, "merge") for way in ways]
    return Model(name=name, modules=(*(module for way in ways for module in way), llm), edges=(*inner, *ends))


def apart(name: str, *ways: tuple[ModelModule, ...]) -> Model:
    """Ways of encoder, ..., projector that meet in a loss alone."""
    edges = [edge(a.name, b.name, "input") for way in ways for a, b in pairwise(way)]
    return Model(name=name, modules=tuple(module for way in ways for module in way), edges=tuple(edges))


def divided(fields: Fields, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise fields.error("num_attention_heads", f"width {hidden} is not a multiple of {heads} heads")
    return hidden // heads


def projector_module(
    dims: tuple[int, ...],
    *,
    name: str = "projector",
    modality: Modality = "vision",
    bias: Any = None,
    merge: int = 1,
    pool: int = 1,
    norm: Literal["layer", "rms"] | None = None,
    norm_first: bool = False,
    gated: bool = False,
    stored: int = 0,
    reads: int = 1,
) -> ModelModule:
    """`pool` tokens averaged, `merge` joined, a norm before or after joining, linears between the widths `dims`."""
    projector = Projector(
        dims=dims,
        merge=merge,
        pool=pool,
        gated=gated,
        norm=norm,
        norm_before_merge=norm_first,
        bias=bias is not False,
        reads=reads,
    )
    return ModelModule(
        name=name, kind="projector", modality=modality, projector=projector, stored=stored, source=SOURCE
    )


def merger_module(
    tower: Fields, hidden: int, width: int, norm: Literal["layer", "rms"], name: str = "projector"
) -> ModelModule:
    """Qwen's patch merger: norm on single tokens, then merge^2 tokens joined, two linears."""
    merge = tower.count("spatial_merge_size", most=100) ** 2
    return projector_module((hidden * merge, hidden * merge, width), name=name, merge=merge, norm=norm, norm_first=True)


def stepping(steps: Steps, ends: tuple[int, int], *, name: str, merge: int = 1, stored: int = 0) -> ModelModule:
    """A projector of steps, from and to widths `ends`."""
    return ModelModule(
        name=name,
        kind="projector",
        modality="vision",
        projector=Projector(dims=ends, merge=merge),
        form=Form(front=steps),
        stored=stored,
        source=SOURCE,
    )
