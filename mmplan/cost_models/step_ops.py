"""The operators of layers that steps describe (`scenario/steps.py`): one rule per step."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from mmplan.cost_models.blocks import attention_ops, linear_ops, mlp_body
from mmplan.cost_models.experts import moe_ops
from mmplan.cost_models.linear_attention import scan_ops
from mmplan.cost_models.ops import (
    Activation,
    Add,
    Attention,
    Convolution,
    Embedding,
    Interleave,
    MergeRows,
    Multiply,
    Norm,
    Op,
    Pool,
    Slice,
    Stored,
)
from mmplan.cost_models.values import Rows, Value
from mmplan.scenario.scenario import Training, Transformer
from mmplan.scenario.steps import (
    Active,
    Aside,
    Attend,
    Average,
    Beside,
    Choose,
    Convolve,
    Dense,
    Doubled,
    Experts,
    Fold,
    Fork,
    Halve,
    Join,
    Kept,
    Look,
    Mlp,
    Normed,
    Scan,
    Split,
    Step,
    Steps,
    Usual,
    Widen,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Around:
    """What the steps of a block find there: its `shape`, the rows that `Attend` reads `across`, the window of its
    attention to own rows, whether that turns queries and keys, the operators of the usual block on `x`, and those of
    what stands in place of plain attention (latent or linear attention, a convolution)."""

    shape: Transformer
    context: Value | None
    window: int | None
    rope: bool
    usual: Callable[[], tuple[Op, ...]]
    mixer: Callable[[Value], tuple[Op, ...]] | None = None


class _Writer:
    """Operators in order, with a name of its own for each value and weight."""

    def __init__(self, training: Training, around: Around | None) -> None:
        self.ops: list[Op] = []
        self.training, self.given = training, around
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return f"s{self.count}"

    @property
    def around(self) -> Around:
        if self.given is None:
            raise ValueError("only the steps of a block attend or have an MLP")
        return self.given

    def run(self, steps: Steps, x: Value) -> Value:
        for step in steps:
            x = self._one(step, x)
        return x

    def _one(self, step: Step, x: Value) -> Value:
        name, trained = self.name(), self.training.mode == "full"
        y = Value(name, x.rows, x.width)
        match step:
            case Dense():
                y = replace(y, width=step.width)
                self.ops += linear_ops(name, x, y, self.training, bias=step.bias)
                return y
            case Convolve():
                y = Value(name, _scaled(x.rows, step.spreads, step.joins), step.width)
                convolution = Convolution(
                    name=name,
                    x=x,
                    y=y,
                    taps=step.taps,
                    groups=step.groups,
                    bias=step.bias,
                    transposed=step.transposed,
                    trainable=trained,
                )
                self.ops.append(convolution)
            case Normed():
                self.ops.append(Norm(name=name, x=x, y=y, kind=step.kind, trainable=trained, bias=step.bias))
            case Active():
                self.ops.append(Activation(kind=step.function, x=x, y=y))
            case Halve():
                a, b, opened = (Value(f"{name}_{part}", x.rows, x.width // 2) for part in ("a", "b", "open"))
                y = replace(y, width=x.width // 2)
                self.ops += [Slice(x=x, y=a, start=0), Slice(x=x, y=b, start=x.width // 2)]
                self.ops += [Activation(kind=step.function, x=b, y=opened), Multiply(a=a, b=opened, y=y)]
            case Kept():
                self.ops.append(Stored(name=name, x=x, y=y, size=step.size, trainable=trained))
            case Look():
                y = replace(y, width=step.width)
                self.ops.append(Embedding(name=name, y=y, size=step.size, trainable=trained))
            case Join() | Average() | Widen() | Fold() | Split() | Doubled():
                return self._regrouped(step, x, y)
            case Aside() | Beside() | Fork():
                return self._branched(step, x, y)
            case _:
                return self._of_block(step, x, y)
        return y

    def _regrouped(self, step: Join | Average | Widen | Fold | Split | Doubled, x: Value, y: Value) -> Value:
        """Steps that make rows or columns more or fewer."""
        name = y.name
        match step:
            case Join():
                y = Value(name, _scaled(x.rows, 1, step.rows), x.width * step.rows)
                self.ops.append(MergeRows(x=x, y=y, merge=step.rows))
            case Average():
                y = replace(y, rows=_scaled(x.rows, 1, step.rows))
                self.ops.append(Pool(x=x, y=y, size=step.rows))
            case Widen():
                y = replace(y, width=x.width * step.times)
                self.ops.append(Interleave(parts=(x,), keys=(x.name,), y=y))
            case Fold():
                y = replace(y, width=x.width // step.parts)
                apart = replace(x, rows=_scaled(x.rows, step.parts, 1), width=y.width)
                self.ops.append(Pool(x=apart, y=y, size=step.parts))
            case Split():
                y = Value(name, _scaled(x.rows, step.parts, 1), x.width // step.parts)
                self.ops.append(MergeRows(x=x, y=y, merge=1))  # a view, as joining is
            case Doubled():
                y = replace(y, rows=_scaled(x.rows, 2, 1))
                self.ops.append(Interleave(parts=(x,), keys=(x.name,), y=y))
        return y

    def _branched(self, step: Aside | Beside | Fork, x: Value, y: Value) -> Value:
        """Steps that run others on x."""
        match step:
            case Aside():
                self.run(step.steps, x)
                return x
            case Beside():
                made = self.run(step.steps, x)
                y = replace(y, width=x.width + made.width)
                self.ops.append(Interleave(parts=(x, made), keys=(x.name, made.name), y=y))
            case Fork():
                left, right = self.run(step.left, x), self.run(step.right, x)
                y = replace(left, name=y.name, sharded=False)
                parts = right.width if right.width != left.width else 0
                op = Multiply(a=left, b=right, y=y, groups=parts) if step.product else Add(a=left, b=right, y=y)
                self.ops.append(op)
        return y

    def _of_block(self, step: Attend | Experts | Scan | Choose | Usual | Mlp, x: Value, y: Value) -> Value:
        """Steps that only a block has."""
        name = y.name
        match step:
            case Attend():
                return self._attend(step, x, f"{name}_")
            case Experts():
                return self._experts(step, x, f"{name}_")
            case Scan():
                self.ops += scan_ops(step, x.width, self.training, x, f"{name}_")
                return self.ops[-1].y
            case Choose():
                return self._choose(step, x, name)
            case Usual():
                self.ops += self.around.usual()
                return self.ops[-1].y
            case Mlp():
                shape = self.around.shape
                self.ops += mlp_body(shape, self.training, x, y, step.ffn or shape.ffn, prefix=f"{name}_")
        return y

    def _attend(self, step: Attend, x: Value, prefix: str) -> Value:
        around = self.around
        if around.mixer is not None and not step.across:
            self.ops += around.mixer(x)
            return self.ops[-1].y
        context, window = (around.context, None) if step.across else (None, around.window)
        self.ops += attention_ops(
            around.shape,
            self.training,
            x,
            rope=around.rope,
            window=window,
            context=context,
            prefix=prefix,
            shared=step.shared,
        )
        return self.ops[-1].y

    def _experts(self, step: Experts, x: Value, prefix: str) -> Value:
        shape = self.around.shape
        assert shape.moe is not None
        if step.latent is None:
            self.ops += moe_ops(shape, shape.moe, self.training, x)
            return self.ops[-1].y
        low, out = (
            Value(f"{prefix}{name}", x.rows, width) for name, width in (("low", step.latent), ("high", x.width))
        )
        self.ops += linear_ops(low.name, x, low, self.training, bias=shape.mlp_bias)
        routed = replace(shape.moe, shared_ffn=0)
        self.ops += moe_ops(replace(shape, hidden=step.latent), routed, self.training, low)
        self.ops += linear_ops(out.name, self.ops[-1].y, out, self.training, bias=shape.mlp_bias)
        if not shape.moe.shared_ffn:
            return out
        shared, both = (Value(f"{prefix}{name}", x.rows, x.width) for name in ("shared", "both"))
        self.ops += mlp_body(shape, self.training, x, shared, shape.moe.shared_ffn, prefix=prefix)
        self.ops.append(Add(a=out, b=shared, y=both))
        return both

    def _choose(self, step: Choose, x: Value, name: str) -> Value:
        """Scores are products of queries and keys without values; nothing but their order is used."""
        width = step.heads * step.head_dim
        q, k, scores = (
            Value(f"{name}_{part}", x.rows, size) for part, size in (("q", width), ("k", step.head_dim), ("y", 0))
        )
        read = x
        if step.low is not None:
            read = Value(f"{name}_low", x.rows, step.low)
            self.ops.append(Slice(x=x, y=read, start=0))
        self.ops += linear_ops(q.name, read, q, self.training, bias=False)
        self.ops += linear_ops(k.name, x, k, self.training, bias=False)
        if step.pool > 1:
            k, single = replace(k, name=f"{name}_pooled", rows=_scaled(k.rows, 1, step.pool)), k
            self.ops.append(Pool(x=single, y=k, size=step.pool))
        self.ops.append(
            Attention(
                q=q,
                k=k,
                v=k,
                y=scores,
                heads=step.heads,
                kv_heads=1,
                head_dim=step.head_dim,
                causal=True,
                pairs=Rows("pairs", per=step.pool),
                value_dim=0,
            )
        )
        return x


def step_ops(steps: Steps, x: Value, y_rows: Rows, training: Training, around: Around | None = None) -> tuple[Op, ...]:
    """Operators of the steps on x; the last one's value has rows `y_rows`, another name for as many."""
    writer = _Writer(training, around)
    writer.run(steps, x)
    last = writer.ops[-1]
    return (*writer.ops[:-1], replace(last, y=replace(last.y, rows=y_rows)))


def _scaled(rows: Rows, times: int, per: int) -> Rows:
    return replace(rows, times=rows.times * times, per=rows.per * per)
