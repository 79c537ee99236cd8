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
    kept: the backward computes the chunks again. With `scan` it is Mamba 2's state space (arXiv 2405.21060,
    section 6) in chunks of so many rows: S = a S + d k v^T, with A, a bias and a skip per value head.
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
    scan: int = 0

    @property
    def key_dim(self) -> int:
        return self.k.width // self.key_heads

    @property
    def value_dim(self) -> int:
        return self.v.width // self.value_heads

    def solve_flops(self) -> int:
        """Of one row and value head in the backward, for the solved system, which a scan has not."""
        return 0 if self.scan else 4 * CHUNK**2

    def row_flops(self) -> int:
        """Forward products of one row in one value head: keys with keys, the solved system with keys and with values,
        queries with keys, weights with new values, and three products with the state."""
        key, value = self.key_dim, self.value_dim
        if self.scan:  # queries with keys in each group, weights with values, two products with the state
            return 2 * (self.scan * key * self.key_heads // self.value_heads + self.scan * value + 2 * key * value)
        return 2 * (3 * CHUNK * key + 2 * CHUNK * value + 3 * key * value)
