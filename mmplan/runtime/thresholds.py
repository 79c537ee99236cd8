"""What a run may differ from its prediction; light enough for the command line to show the defaults in its help."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """Largest allowed differences; bytes are always exact.

    `bubble` is in absolute points (0.05 = 5 points) against the replay, `rehearsed_bubble` against the plan in a
    rehearsal: sleeps came within 2.8 points at worst and mostly within 2 of simulation at 30 ms units. A single rank
    may differ twice as much. The others are fractions: step time of the replay (in a rehearsal of the plan), memory of
    the plan. Communication time is told without verdict when None: a loopback link has no data sheet. Nor is there a
    verdict on bubble and step time of computes on CPU without two cores for each process (one computes, one runs the
    communication thread): what a process waits for its core is in neither prediction and came to 1 to 10 points on two
    cores. Rehearse the plan there.
    """

    bubble: float = 0.05
    rehearsed_bubble: float = 0.02
    step_time: float = 0.15
    memory: float = 0.10
    communication: float | None = None
