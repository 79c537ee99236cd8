"""How much longer a step takes because all devices wait for the slowest: one rule, beyond what fitted links hold.

Residuals of multi-node rows of the shipped table fall by 0.5 % per doubling of the nodes (774 rows, slope of
log(predicted / measured) over log2(nodes): -0.0054), as expected of a maximum over independent delays with an
exponential tail. The evidence is weak: sources differ in more than their nodes. Up to 64 nodes, where nine in ten of
the multi-node rows behind `link.network.fraction` ran, the fitted fraction holds the waiting of those rows already.
"""

import math

SHARE_PER_DOUBLING = 0.005
FITTED_NODES = 64


def straggler_share(nodes: int) -> float:
    """Of a step on so many nodes, by how much waiting makes it longer; nothing up to `FITTED_NODES`."""
    return SHARE_PER_DOUBLING * max(0.0, math.log2(nodes / FITTED_NODES))
