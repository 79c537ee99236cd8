"""Variance of the gradient over its shards: ranks of data parallelism, microbatches of a step.

Of the contributions g_1 .. g_n to a step's gradient, V = sum_k ||g_k - mean||^2 / (n - 1), the trace of their
covariance. It needs no second gradient: V = (sum_k ||g_k||^2 - ||sum_k g_k||^2 / n) / (n - 1), one number per rank to
be summed.

The reported growth (2 shards x 256 tokens: 3.2e3; 4 x 1024: 8.7e6; 8 x 4096: 1.4e9) is that of losses summed over
tokens: for independent tokens V of a sum grows as the length and that of a mean falls as its inverse, and V does not
grow with the number of shards at all (`benchmarks/health_rates.py`). A limit on it is a limit for one scale of loss.
"""

from mmplan.runtime.health.rule import Rule

RULE = Rule(
    monitor="gradient_variance",
    metric="trace of the covariance of the gradient's contributions over ranks and microbatches",
    unit="squared gradient",
    limit=1e6,
    fires="above",
    source="alarm above 1e6 reported in an article; it holds for losses that are means over tokens",
    advice="divide the loss by the number of tokens, not of samples; even out the visual tokens per rank; see `detail` "
    "for the variance relative to the mean gradient, which does not depend on the scale of the loss",
    certainty=0.7,
    explains=("loss",),
    patience=2,
)


def contribution_variance(squares: float, total_square: float, count: int) -> float:
    """V of `count` contributions.

    Args:
        squares: sum of their squared norms.
        total_square: squared norm of their sum.

    Raises:
        ValueError: fewer than two have no variance.
    """
    if count < 2:
        raise ValueError(f"{count} contribution has no variance, 2 are needed")
    return max(0.0, (squares - total_square / count) / (count - 1))
