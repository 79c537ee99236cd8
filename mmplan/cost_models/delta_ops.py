"""The operators of linear attention by the gated delta rule (part of `ops.Op`), arXiv 2412.06464, section 3.3."""

from dataclasses import dataclass

from mmplan.cost_models.values import Value

CHUNK = 64  # rows that are computed at once (fla-org/flash-linear-attention, `chunk_gated_delta_rule`)


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalConv:
    """Each column's weighted sum over a row and the kernel - 1 rows before it in its sequence. A few multiply-adds per
    number: it takes the time of its bytes."""

    name: str
    x: Value
    y: Value
    kernel: int
    trainable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaRule:
    """S = a S + b k (v - a S^T k)^T, y = S^T q for each row and value head, in chunks of `CHUNK` rows.

    gate, step: [rows, value_heads]; a = exp(-exp(A) softplus(gate + bias)) and b = sigmoid(step), with A and bias per
    value head. Queries and keys are normalised; key heads serve equal numbers of value heads. Its inputs alone are
    kept: the backward computes the chunks again.
    """

    name: str
    q: Value
    k: Value
    v: Value
    gate: Value
    step: Value
    y: Value
    key_heads: int
    value_heads: int
    trainable: bool

    @property
    def key_dim(self) -> int:
        return self.k.width // self.key_heads

    @property
    def value_dim(self) -> int:
        return self.v.width // self.value_heads

    def row_flops(self) -> int:
        """Forward products of one row in one value head: keys with keys, the solved system with keys and with values,
        queries with keys, weights with new values, and three products with the state."""
        key, value = self.key_dim, self.value_dim
        return 2 * (3 * CHUNK * key + 2 * CHUNK * value + 3 * key * value)
