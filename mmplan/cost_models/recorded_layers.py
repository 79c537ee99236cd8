"""Layers of a recorded model as operators (`recorded_ops.py`)."""

from mmplan.cost_models.ops import Attention, Op
from mmplan.cost_models.recorded_ops import Entered, HeldWeights, RecordedProduct, RecordedRest
from mmplan.cost_models.values import Rows, Value
from mmplan.scenario.recorded import Product, Recorded, RecordedLayer
from mmplan.scenario.scenario import Training

WEIGHTS = Rows("sequences")


def recorded_ops(layer: RecordedLayer, recorded: Recorded, training: Training) -> tuple[Op, ...]:
    """Operators of one layer; its inputs are x0, x1, ... in the order of `layer.reads`."""
    kind, per = recorded.kind(layer.kind), recorded.samples
    trained = training.mode != "frozen"
    rows = Rows("tokens", per=per)
    reads = tuple(Value(f"x{index}", rows, read.numbers) for index, read in enumerate(layer.reads))
    weights = Value("weights", WEIGHTS, 0)
    entered = Value("entered", WEIGHTS, 0)
    ops: list[Op] = []
    if frozen := kind.parameters - kind.trained:
        own = tuple((one.tp, one.parameters - one.trained) for one in kind.on_ranks)
        ops.append(
            HeldWeights(name="frozen", y=Value("frozen", WEIGHTS, 0), size=frozen, trainable=False, on_ranks=own)
        )
    if kind.trained or any(product.weight == "trained" for product in kind.products):  # those of another layer, too
        own = tuple((one.tp, one.trained) for one in kind.on_ranks)
        ops.append(HeldWeights(name="trained", y=weights, size=kind.trained, trainable=trained, on_ranks=own))
    ops.append(Entered(inputs=(*reads, weights), y=entered))
    for index, product in enumerate(kind.products):
        ops.append(_product(product, f"p{index}", reads, weights, per, trained=trained))
    for index, attention in enumerate(kind.attentions):
        heads, head_dim = attention.heads, attention.head_dim
        rows_of_head = Rows("tokens", times=attention.rows, per=per)
        q, y = (
            Value(name, rows_of_head, heads * dim, on_ranks=tuple((tp, own * dim) for tp, own in attention.on_ranks))
            for name, dim in (("entered", head_dim), (f"a{index}", attention.value_dim))
        )
        ops.append(
            Attention(
                q=q,
                k=q,
                v=q,
                y=y,
                heads=heads,
                kv_heads=heads,
                head_dim=head_dim,
                causal=attention.causal,
                pairs=Rows("tokens", times=attention.pairs, per=per),
                value_dim=attention.value_dim,
                kept_apart=True,
            )
        )
    rest = RecordedRest(
        inputs=reads,
        weights=weights,
        y=Value("y", rows, kind.output),
        moved=Value("moved", rows, kind.moved, on_ranks=tuple((one.tp, one.moved) for one in kind.on_ranks)),
        kernels=kind.kernels,
        kept=kind.kept,
        kept_frozen=kind.kept_frozen,
        kept_first=kind.kept_first,
        on_ranks=kind.on_ranks,
    )
    return (*ops, rest)


def _product(
    product: Product, name: str, reads: tuple[Value, ...], weights: Value, per: int, *, trained: bool
) -> RecordedProduct:
    inputs = reads if product.reads in ("inputs", "both") else ()
    inputs += (weights,) if product.reads in ("weights", "both") else ()
    return RecordedProduct(
        inputs=inputs,
        y=Value(name, Rows("tokens", times=product.rows, per=per), product.outer),
        rows=Rows("tokens", times=product.rows, per=per),
        inner=product.inner,
        outer=product.outer,
        groups=product.groups,
        operands=product.operands,
        trainable=trained and product.weight == "trained",
        on_ranks=product.on_ranks,
    )
