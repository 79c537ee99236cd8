"""Names of pipeline schedules as scenarios and plans write them."""

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
