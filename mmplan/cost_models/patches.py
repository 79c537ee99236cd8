"""Which modules can have the rows of their images cut over ranks (patch groups, the third axis of 2.5D sharding):
encoders, and projectors behind them; both may join or average every few rows that follow each other.
"""

from functools import lru_cache

from mmplan.cost_models.build import model_layers
from mmplan.cost_models.layer import Layer, splits_rows
from mmplan.cost_models.ops import (
    Activation,
    Add,
    Attention,
    Linear,
    MergeRows,
    Multiply,
    Norm,
    Op,
    Pool,
    Rope,
    Scale,
    Stored,
)
from mmplan.cost_models.strided import strided
from mmplan.scenario.scenario import Model

ROW_BY_ROW = (Linear, Norm, Scale, Activation, Multiply, Add, Rope, Stored)


@lru_cache(maxsize=16)
def patch_modules(model: Model) -> tuple[str, ...]:
    """Names of modules that read images or sound and whose blocks work row by row but for their attention: rows are
    neither added nor dropped (a class token behind the last block is), so that a rank keeps its own; at most averaged
    at the end. With the projectors that can take these rows as they lie."""
    raw = tuple(module.name for module in model.modules if module.vision is not None or module.audio is not None)
    cut = tuple(name for name in raw if not _needing(model, name))
    behind = (module.name for module in model.modules if module.projector is not None)
    return (*cut, *(name for name in behind if read_by(model, name) in cut and not _needing(model, name)))


def read_by(model: Model, name: str) -> str:
    """The module whose tokens a projector reads; empty of others."""
    if model.module(name).projector is None:
        return ""
    return next((edge.producer for edge in model.edges if edge.consumer == name), "")


def row_changing(model: Model, name: str) -> str:
    """The first operator that speaks against cutting a module's rows; empty where none does."""
    return next((type(op).__name__ for op in _needing(model, name)), "")


def _needing(model: Model, name: str) -> list[Op]:
    """Operators of a module that need rows of other ranks, of which it has not."""
    layers = [layer for layer in model_layers(model) if layer.module == name]
    if model.module(name).projector is None:
        blocks = [layer for layer in layers if "block" in layer.kind]
        return [op for layer in blocks for op in layer.ops if not _keeps_rows(op) and not strided(op, layer)]
    (layer,) = layers
    if model.module(name).form is not None:
        return list(layer.ops)
    several = [op for op in layer.ops if strided(op, layer)][1:]
    return [*several, *(op for op in layer.ops if not _row_by_row(layer, op))]


def _row_by_row(layer: Layer, op: Op) -> bool:
    """Of a projector."""
    joins = isinstance(op, Pool | MergeRows) and not splits_rows(layer)
    return isinstance(op, ROW_BY_ROW) or joins


def _keeps_rows(op: Op) -> bool:
    own = isinstance(op, Attention) and not op.cross and not op.causal
    return own or isinstance(op, ROW_BY_ROW)
