"""Chains of equal stages with orders written by hand, timed by the array clock."""

from collections.abc import Sequence

import numpy as np

from mmplan.planner.columns import KINDS, SEND, STEP, W
from mmplan.planner.dry_run import schedule_columns
from mmplan.planner.place import Pipeline, Transfer, place
from mmplan.planner.schedule import Compute
from mmplan.planner.waves import lowered_waves, price

FORWARD_S, INPUT_S, WEIGHT_S = 1.0, 1.25, 0.5

Order = list[tuple[int, str, int]]  # chunk, kind, microbatch


def chain_times(orders: Sequence[Order], m: int, lag_s: float, chunks: int = 1) -> tuple[float, float]:
    """Seconds from the first start to the last end, and the longest such span of one rank.

    Rank r holds the stages r, r + p, ...; F, B, I, W of one stage take a chunk's part of the seconds above.
    """
    p = len(orders)
    stages = p * chunks
    seconds = (FORWARD_S / chunks, (INPUT_S + WEIGHT_S) / chunks, INPUT_S / chunks, WEIGHT_S / chunks)
    schedule = tuple(
        tuple(Compute(chunk * p + rank, kind, microbatch) for chunk, kind, microbatch in order)  # type: ignore[arg-type]
        for rank, order in enumerate(orders)
    )
    pipeline = Pipeline(
        schedule=schedule_columns(schedule, stages, m),
        ranks=(tuple(range(p)),),
        transfers=tuple(
            Transfer(source=s, target=s + 1, activation=f"{s}>{s + 1}", gradient=f"{s}<{s + 1}")
            for s in range(stages - 1)
        ),
        seconds=(seconds,) * stages,
        reduce_bytes=(0,) * stages,
    )
    lowered = place(pipeline, np.ones((1, m, stages - 1), dtype=np.int64))
    columns = lowered.columns
    prices = np.zeros(len(KINDS))
    prices[: len(seconds)] = seconds
    prices[SEND] = lag_s
    prices[STEP] = 0.0
    start_s, end_s = price(lowered_waves(lowered), prices[columns.kind])
    computes = columns.kind <= W
    rows = columns.row
    spans_s = [float(end_s[computes & (rows == r)].max() - start_s[computes & (rows == r)].min()) for r in range(p)]
    return float(end_s[computes].max() - start_s[computes].min()), max(spans_s)


def one_f_one_b(p: int, m: int, v: int, *, whole: bool) -> list[Order]:
    """Interleaved 1F1B in Megatron's order (Narayanan et al., SC 2021, section 2.2.2); plain 1F1B for v = 1."""
    orders = []
    for rank in range(p):
        slots = [(k % (p * v) // p, k // (p * v) * p + k % p) for k in range(m * v)]
        warm = p - rank - 1 if v == 1 else 2 * (p - rank - 1) + (v - 1) * p
        order: Order = [(chunk, "F", k) for chunk, k in slots[:warm]]
        for position, (chunk, k) in enumerate(slots):
            order += [(c, "F", j) for c, j in slots[warm + position : warm + position + 1]]
            order += [(v - 1 - chunk, kind, k) for kind in ("B" if whole else "IW")]
        orders.append(order)
    return orders


def zero_bubble(m: int, *, warm: int, limit: int) -> Order:
    """Warm-up forwards, then I, [W when the forwards ahead of W would pass the limit], F; then I and W in turn."""
    done = {"F": min(warm, m), "I": 0, "W": 0}
    order: Order = [(0, "F", k) for k in range(done["F"])]

    def add(kind: str) -> None:
        order.append((0, kind, done[kind]))
        done[kind] += 1

    while done["F"] < m:
        add("I")
        if done["F"] + 1 - done["W"] > limit:
            add("W")
        add("F")
    while done["I"] < m:
        add("I")
        add("W")
    while done["W"] < m:
        add("W")
    return order
