"""Progress bars of a training: `10%|#   | 10/100 [00:30<04:30, 3.00s/it]` of the Hugging Face Trainer and of Lightning.

A log holds many bars: of weights that are loaded, data that are mapped, evaluations. Those with a description are none
of a training (Lightning's `Epoch 3:` and ms-swift's `Train:` are). Of the others it is the one whose total the log
names, else the one beside which losses are printed, else one whose words say so, else the one with the most states
where other lines tell of a training. Its seconds are a mean over the last steps (tqdm, smoothing 0.3).
"""

import re
from collections import Counter
from dataclasses import dataclass, field

from mmplan.scenario.formats.logs.lines import MOST_S, Iteration

MOST_STATES = 500_000
MOST_BARS = 1_000
_BAR = re.compile(
    r"(\d{1,3})%\|[^|\n]{0,300}\|\s*(\d{1,9})/(\d{1,9})\s*\[[\d:]{4,12}<[\d:?]{1,12},\s*([\d.]{1,12})(s/it|it/s)"
)
_TAG = re.compile(
    r"^\s*(?:\[[^\]]{1,40}\](?:<std\w{1,5}>)?:?|[A-Za-z][\w.-]{0,62}\d[\w.-]{0,62}:(?=\s))"
)  # of a rank or host
_EPOCH = re.compile(r"\b[Ee]poch[ :\[]{0,3}(\d{1,6})(?:/\d{1,6})?\]?:?\s*$")
_OF_TRAINING = re.compile(r"\b(?:Train(?:ing)?|Steps?|Progress|Global step):\s*$", re.IGNORECASE)
_DESCRIBED = re.compile(r"[A-Za-z][\w ()\[\]./#-]{0,80}:\s*$")


@dataclass(slots=True)
class Bars:
    """States of each bar by its total, filled line by line.

    `beside`: how often a loss stood beside it. `described`: those whose words say that they are of a training.
    """

    states: dict[int, list[Iteration]] = field(default_factory=dict)
    described: set[int] = field(default_factory=set)
    beside: Counter[int] = field(default_factory=Counter)
    last: int | None = None
    count: int = 0

    def add(self, text: str, line: int) -> None:
        """The states that a line holds."""
        if "%|" not in text:
            return
        for match in _BAR.finditer(text):
            before = _TAG.sub("", text[: match.start()], count=1)
            epoch = _EPOCH.search(before)
            of_training = epoch is not None or _OF_TRAINING.search(before) is not None
            if not of_training and _DESCRIBED.search(before):
                continue
            step, total, rate = int(match[2]), int(match[3]), _number(match[4])
            if not 0 < step <= total or rate is None or self.count >= MOST_STATES:
                continue
            if total not in self.states and len(self.states) >= MOST_BARS:
                continue
            seconds = rate if match[5] == "s/it" else 1 / rate
            number = step + (int(epoch[1]) * total if epoch is not None else 0)
            known = self.states.setdefault(total, [])
            if known and number < known[-1].step and epoch is None:
                if len(known) > step:  # the same bar started anew, and has not come as far
                    continue
                known.clear()
            if 0 < seconds <= MOST_S and not (known and known[-1].step >= number):
                known.append(Iteration(line=line, step=number, steps=None, seconds=seconds))
                self.count += 1
            self.last = total
            self.described |= {total} if of_training else set()

    def of_training(self, named_total: int | None, *, trained: bool) -> list[Iteration]:
        """The states of the training's bar; empty without one. `trained`: other lines say that this is a training."""
        if named_total in self.states:
            return self.states[named_total]
        if self.beside:
            return self.states[self.beside.most_common(1)[0][0]]
        totals = self.described or (self.states.keys() if trained else ())
        return max((self.states[total] for total in totals), key=len, default=[])


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value > 0 else None
