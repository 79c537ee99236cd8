"""Schedules as text: one line per rank of actions such as `3F0`; and as CSV of torch's pipelining runtime.

`torch.distributed.pipelining` reads a file with one row per rank and one action per cell (`_load_csv` with format
`compute_only`): stage, then `F`, `B` (whole backward), `I` or `W`, then microbatch; empty cells are idle slots.
"""

import csv
import io

from mmplan.planner.schedule import Compute, Schedule


def schedule_text(schedule: Schedule) -> str:
    """One line per rank; `parse_schedule` is the inverse."""
    return "\n".join(" ".join(map(str, order)) for order in schedule)


def parse_schedule(text: str) -> Schedule:
    """ValueError names the word that is not an action."""
    return tuple(tuple(Compute.parse(word) for word in line.split()) for line in text.split("\n"))


def schedule_csv(schedule: Schedule) -> str:
    """Rows of torch's CSV form."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([str(action) for action in order] for order in schedule)
    return out.getvalue()


def parse_schedule_csv(text: str) -> Schedule:
    """The orders of a CSV in torch's form; `BW`-style long names of older versions are not read."""
    rows = csv.reader(io.StringIO(text))
    return tuple(tuple(Compute.parse(cell.strip()) for cell in row if cell.strip()) for row in rows)
