"""Throughput of a logged run: what is printed, and what the arithmetic allows.

Model work of a step is 6 x parameters x tokens (arXiv 2104.04473, appendix; attention aside), so that a printed rate
far from it counts something else: all GPUs together, recomputation, or nothing that was measured.
"""

import statistics
from typing import Any

from mmplan.errors import InputError
from mmplan.scenario.formats.launch.facts import SetUp
from mmplan.scenario.formats.logs.other_steps import SAMPLES, TOKENS_PER_GPU
from mmplan.scenario.formats.logs.run import Run
from mmplan.scenario.formats.logs.steps import Steps

MOST_TFLOPS = 20_000  # dense FP8 or FP4 of any device sold by 2026 stays below
NEAR = 1.25  # printed rates are means over other steps
LOW, HIGH = 0.5, 2.5  # printed over 6 N tokens: recomputation gives 4 / 3, attention of long sequences up to 2
TERA = 1e12


def throughput_of(run: Run, steps: Steps, setup: SetUp, warnings: list[str]) -> dict[str, Any]:
    """`tokens_per_s` and `tflops_per_gpu` where they are known; contradictions are told."""
    values: dict[str, Any] = {}
    batch = steps.batch or _number(setup, "global_batch")
    sequence = _number(setup, "sequence")
    gpus = _number(setup, "world")
    if batch:
        values["samples_per_s"] = round(batch / steps.median_s, 6)
    if batch and sequence:
        values["tokens_per_s"] = round(batch * sequence / steps.median_s, 3)
    tokens = batch * sequence / steps.median_s / gpus if batch and sequence and gpus else None
    for words, key, expected in (
        (SAMPLES, "printed_samples_per_s", values.get("samples_per_s")),
        (TOKENS_PER_GPU, "printed_tokens_per_s_per_gpu", tokens),
    ):
        rate = _median_of(words, steps)
        if rate is None and words == SAMPLES:
            rate = run.summary.samples_per_s or None
        if rate is None:
            continue
        values[key] = round(rate, 6)
        if expected is not None and not 1 / NEAR <= rate / expected <= NEAR:
            warnings.append(
                f"{words}: {rate:g} is printed, batch and step time give {expected:.4g}: one of them counts otherwise"
            )
    printed = _printed(run, steps)
    if printed is None:
        return values
    words, rate = printed
    per_gpu = any(word in words for word in ("/gpu", "per gpu", "tflops")) or gpus is None
    parameters = _parameters(setup, run)
    if parameters and batch and sequence and gpus:
        expected = 6 * parameters * batch * sequence / steps.median_s / gpus / TERA
        whole = rate / expected
        if LOW <= whole <= HIGH:
            per_gpu = True
        elif gpus > 1 and LOW <= whole / gpus <= HIGH:
            per_gpu = False
            warnings.append(f"'{words}' {rate:g} is the rate of all {gpus} GPUs together: {rate / gpus:.1f} each")
        else:
            warnings.append(
                f"'{words}' {rate:g} is impossible: 6 x {parameters:,} parameters x {batch * sequence:,} tokens / "
                f"({steps.median_s:g} s x {gpus} GPUs) = {expected:.1f} TFLOP/s per GPU"
            )
    each = rate if per_gpu or not gpus else rate / gpus
    if each > MOST_TFLOPS:
        warnings.append(f"'{words}' {rate:g} TFLOP/s per GPU is more than any device does")
    values["printed_tflops_per_gpu"] = round(each, 4)
    return values


def _median_of(words: str, steps: Steps) -> float | None:
    rates = [iteration.fields[words] for iteration in steps.iterations if words in iteration.fields]
    return statistics.median(rates) if rates else None


def _printed(run: Run, steps: Steps) -> tuple[str, float] | None:
    """(words, median) of the field that names TFLOP/s."""
    for words in dict.fromkeys(key for iteration in steps.iterations for key in iteration.fields):
        if "tflop" in words:
            rates = [iteration.fields[words] for iteration in steps.iterations if iteration.fields.get(words, 0) > 0]
            if rates:
                return words, statistics.median(rates)
    rates = [rate for _, rate in run.step_times if rate is not None]
    return ("MODEL_TFLOP/s/GPU", statistics.median(rates)) if rates else None


def _number(setup: SetUp, name: str) -> int | None:
    try:
        return setup.count(name, most=1_000_000_000)
    except InputError:
        return None


def _parameters(setup: SetUp, run: Run) -> int | None:
    if run.total_parameters is not None:
        return run.total_parameters
    tp, pp = _number(setup, "tp") or 1, _number(setup, "pp") or 1
    return sum(run.parameters.values()) if run.parameters and len(run.parameters) == tp * pp else None
