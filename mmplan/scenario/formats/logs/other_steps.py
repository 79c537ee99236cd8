"""Lines of steps that do not say a step's seconds: torchtitan, Automodel, DeepSpeed's timer, ms-swift, LLaMA-Factory.

They say a rate, or stand beside the time of the clock: `with_seconds` makes seconds of the clock between two lines, and
`from_rates` of a rate and the batch. Lines of evaluations (`validate step:`) are none.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from mmplan.scenario.formats.logs.lines import MOST_S, Iteration, clock_s, label_of

TOKENS_PER_GPU = "tokens per second per gpu"
SAMPLES = "samples per second"
RATES = frozenset({TOKENS_PER_GPU, SAMPLES})
LEAST_COARSE_S = 10.0  # between lines whose clock has whole seconds
_TITAN = re.compile(r"(?<!validate )\bstep:\s*(\d{1,12})\s+loss:\s*([-+.\w]{1,30})\s")
_TITAN_RATE = re.compile(r"\b(?:tps|wps):\s*([\d,]{1,20}(?:\.\d{1,9})?)(?=\s|$)")
_TITAN_TFLOPS = re.compile(r"\btflops:\s*([\d,]{1,20}(?:\.\d{1,9})?)(?=\s|$)")
_AUTOMODEL = re.compile(
    r"\bstep (\d{1,12}) \| epoch \d{1,9} \| loss ([-+.\w]{1,30}) \|.{0,300}\btps [\d.,]{1,20}"
    r"(?:\(([\d.,]{1,20})/gpu\))?"
)
_DEEPSPEED_TIMER = re.compile(
    r"\b(?:global_step=(\d{1,12}), )?(?:RunningAvgSamplesPerSec=[\d.a-z]{1,30}, )?(?:Curr)?SamplesPerSec=([\d.]{1,30})"
)
_OLD_TIMER = re.compile(r"\b\d{1,9}/(\d{1,12}), (?:RunningAvg)?SamplesPerSec=")
_SWIFT = re.compile(r"['\"](?:global_step/max_steps|iteration)['\"]:\s*['\"](\d{1,12})/(\d{1,12})['\"]")
_SWIFT_SPEED = re.compile(
    r"['\"](?:train_speed\((iter/s|s/it)\)|elapsed_time_per_iteration)['\"]:\s*['\"]?([\d.]{1,20})(?=['\", }])"
)
_FACTORY = re.compile(r"\"current_steps\":\s*(\d{1,12}),\s*\"total_steps\":\s*(\d{1,12})")
_FACTORY_CLOCK = re.compile(r"\"elapsed_time\":\s*\"(?:(\d{1,4}) days?, )?(\d{1,4}):(\d\d):(\d\d)\"")
_SWIFT_CLOCK = re.compile(
    r"'elapsed_time':\s*'(?:(\d{1,4})d ?)?(?:(\d{1,2})h ?)?(?:(\d{1,2})m ?)?(\d{1,2})s'"
)  # swift/trainers/callback.py
# mmengine/hooks/logger_hook.py of XTuner 0.1 and the other OpenMMLab tools; xtuner/v1/train/trainer.py
_MMENGINE = re.compile(r"\b(?:Iter\(train\) +\[ *|Epoch \d{1,9} Step )(\d{1,12})/(\d{1,12})(?:\]|\s)")
_MMENGINE_TIME = re.compile(r"(?<![\w_])time: ([\d.]{1,20})(?=\s|$)")
_MMENGINE_LOSS = re.compile(r"(?<![\w_])(?:total_)?loss: ([-+.\w]{1,30})(?=\s|$)")
_LOSS = re.compile(r"['\"]loss['\"]:\s*['\"]?([-+.\deE]{1,30}|nan|inf)['\"]?\s*[,}]")


def other_steps_in(text: str, line: int) -> Iterator[Iteration]:
    """The step that a line tells of, without its seconds unless it says them."""
    if "step:" in text and (titan := _TITAN.search(text)) is not None:
        yield from _titan(titan, text, line)
    elif "| epoch" in text and (automodel := _AUTOMODEL.search(text)) is not None:
        fields = _loss(automodel[2]) | (_positive(TOKENS_PER_GPU, automodel[3]) if automodel[3] else {})
        at_s, label = clock_s(text), label_of(text)
        yield Iteration(
            line=line, step=int(automodel[1]), steps=None, seconds=None, fields=fields, label=label, at_s=at_s
        )
    elif "SamplesPerSec=" in text and (timer := _DEEPSPEED_TIMER.search(text)) is not None:
        old = _OLD_TIMER.search(text)
        counted = timer[1] or (old[1] if old is not None else None)
        if counted is not None:  # older timers count microbatches: their clock is that of no step
            at_s = clock_s(text) if timer[1] else None
            fields = _positive(SAMPLES, timer[2])
            yield Iteration(
                line=line, step=int(counted), steps=None, seconds=None, fields=fields, label=label_of(text), at_s=at_s
            )
    elif ("max_steps" in text or "'iteration'" in text) and (swift := _SWIFT.search(text)) is not None:
        speed = _SWIFT_SPEED.search(text)
        rate = number_of(speed[2]) if speed is not None else None
        seconds = None if speed is None or rate is None else 1 / rate if speed[1] == "iter/s" else rate
        yield Iteration(
            line=line,
            step=int(swift[1]),
            steps=int(swift[2]),
            seconds=_possible(seconds),
            fields=loss_in(text),
            at_s=_elapsed_s(_SWIFT_CLOCK.search(text)),
        )
    elif "time: " in text and (own := _MMENGINE.search(text)) is not None:
        lasted, lost = _MMENGINE_TIME.search(text), _MMENGINE_LOSS.search(text)
        yield Iteration(
            line=line,
            step=int(own[1]),
            steps=int(own[2]),
            seconds=_possible(number_of(lasted[1])) if lasted is not None else None,
            fields=_loss(lost[1]) if lost is not None else {},
            label=label_of(text),
        )
    elif "current_steps" in text and "eval_loss" not in text and (own := _FACTORY.search(text)) is not None:
        at_s = _elapsed_s(_FACTORY_CLOCK.search(text))
        yield Iteration(line=line, step=int(own[1]), steps=int(own[2]), seconds=None, fields=loss_in(text), at_s=at_s)


def _elapsed_s(clock: re.Match[str] | None) -> float | None:
    """Days, hours, minutes and seconds since the start."""
    if clock is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _titan(match: re.Match[str], text: str, line: int) -> Iterator[Iteration]:
    """`step: 10  loss: 4.1  grad_norm: 1.2  memory: 30.1GiB(31.7%)  tps: 5,123  tflops: 300.12  mfu: 30.35%`."""
    rate = _TITAN_RATE.search(text, match.end())
    if rate is None:
        return
    fields = _positive(TOKENS_PER_GPU, rate[1])
    if (tflops := _TITAN_TFLOPS.search(text, match.end())) is not None:
        fields |= _positive("tflops per gpu", tflops[1])
    if match[2] not in ("-1.0", "-1.00000", "-1.0000"):  # of a pipeline rank that does not compute it
        fields |= _loss(match[2])
    yield Iteration(
        line=line,
        step=int(match[1]),
        steps=None,
        seconds=None,
        fields=fields,
        label=label_of(text),
        at_s=clock_s(text),
    )


def loss_in(text: str) -> dict[str, float]:
    """The loss of a line that the Hugging Face Trainer and its like print as a mapping."""
    found = _LOSS.search(text)
    return {} if found is None else _loss(found[1])


def _loss(text: str) -> dict[str, float]:
    try:
        value = float(text)
    except ValueError:
        return {}
    return {"lm loss": value} if math.isfinite(value) else {"number of nan iterations": 1.0}


def number_of(text: str) -> float | None:
    """A number above 0, with or without commas between thousands."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if 0 < value < 1e15 else None


def _positive(name: str, text: str) -> dict[str, float]:
    value = number_of(text)
    return {} if value is None else {name: value}


def _possible(seconds: float | None) -> float | None:
    return seconds if seconds is not None and 0 < seconds <= MOST_S else None


def with_seconds(iterations: Iterable[Iteration]) -> list[Iteration]:
    """Iterations of one run with the mean of the clock since an earlier line: the one before or, where the clock has
    whole seconds, the last one that is long enough ago. Lines between have none."""
    made: list[Iteration] = []
    before: Iteration | None = None
    for iteration in iterations:
        found = iteration
        if iteration.at_s is not None:
            seconds = _since(before, iteration)
            found = replace(iteration, seconds=seconds)
            if before is None or seconds is not None or _goes_back(before, iteration):
                before = iteration
        made.append(found)
    return made


def _goes_back(before: Iteration, now: Iteration) -> bool:
    return before.at_s is None or now.at_s is None or now.at_s < before.at_s or now.step <= before.step


def _since(before: Iteration | None, now: Iteration) -> float | None:
    if before is None or before.at_s is None or now.at_s is None or now.step <= before.step:
        return None
    passed_s = now.at_s - before.at_s
    if passed_s <= 0 or (before.at_s.is_integer() and now.at_s.is_integer() and passed_s < LEAST_COARSE_S):
        return None
    return _possible(passed_s / (now.step - before.step))


def from_rates(iterations: Sequence[Iteration], batch: int | None, tokens: Any, gpus: int | None) -> list[Iteration]:
    """Iterations whose rate and batch (samples, or tokens over devices) give the seconds of a step.

    Args:
        tokens: of one sample, None where they are not known.
    """
    made = []
    for iteration in iterations:
        seconds = None
        if batch and (samples := iteration.fields.get(SAMPLES)):
            seconds = batch / samples
        elif batch and tokens and gpus and (rate := iteration.fields.get(TOKENS_PER_GPU)):
            seconds = batch * tokens / gpus / rate
        made.append(replace(iteration, seconds=_possible(seconds)))
    return made
