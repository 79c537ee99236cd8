"""Names of pipeline schedules as scenarios and plans write them."""

from collections.abc import Collection
from typing import Literal, get_args

ScheduleName = Literal[
    "1f1b",
    "gpipe",
    "eager-1f1b",
    "depth-first",
    "encoders-ahead",
    "encoders-in-bubbles",
    "interleaved",
    "looped-bfs",
    "zb-h1",
    "zb-h2",
    "zb-1p",
    "zb-2p",
    "zb-v",
    "v-half",
    "v-min",
    "dualpipe-v",
    "optimized",
]
SCHEDULE_NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)
# Of these, those that two chunks of layers per rank are cut for where a plan has one; `interleaved` runs any number.
IN_TWO_CHUNKS: tuple[ScheduleName, ...] = ("looped-bfs", "zb-v", "v-half", "v-min", "dualpipe-v")


def in_chunks_of(names: Collection[str], vp: Collection[int]) -> tuple[str, ...]:
    """Those of these schedules that have one of so many chunks of layers per rank; all where no number is named."""
    two, several = 2 in vp, any(chunks > 1 for chunks in vp)
    fits = {name: two if name in IN_TWO_CHUNKS else several if name == "interleaved" else 1 in vp for name in names}
    return tuple(name for name in names if fits[name] or not vp)
