"""Which encoders can have the rows of their images cut over ranks: patch groups, the third axis of 2.5D sharding."""

from functools import lru_cache

from mmplan.cost_models.build import model_layers
from mmplan.cost_models.ops import Activation, Add, Attention, Linear, Multiply, Norm, Op, Rope, Scale
from mmplan.scenario.scenario import Model

ROW_BY_ROW = (Linear, Norm, Scale, Activation, Multiply, Add, Rope)


@lru_cache(maxsize=16)
def patch_modules(model: Model) -> tuple[str, ...]:
    """Names of modules that read images or sound and whose blocks work row by row but for their attention: rows are
    neither added nor dropped (a class token behind the last block is), so that a rank keeps its own."""
    blocks = [layer for layer in model_layers(model) if layer.kind in ("block", "cross_block")]
    raw = [module.name for module in model.modules if module.vision is not None or module.audio is not None]
    fit = {name: [layer for layer in blocks if layer.module == name] for name in raw}
    return tuple(name for name in raw if all(_keeps_rows(op) for layer in fit[name] for op in layer.ops))


def row_changing(model: Model, name: str) -> str:
    """The first operator that speaks against cutting a module's rows; empty where none does."""
    ops = (op for layer in model_layers(model) if layer.module == name and "block" in layer.kind for op in layer.ops)
    return next((type(op).__name__ for op in ops if not _keeps_rows(op)), "")


def _keeps_rows(op: Op) -> bool:
    own = isinstance(op, Attention) and not op.cross and not op.causal
    return own or isinstance(op, ROW_BY_ROW)
