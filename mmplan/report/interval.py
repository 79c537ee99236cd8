"""How far a step time may be off, in words, and which numbers that comes from."""

from mmplan.planner.interval import Influence, StepInterval
from mmplan.units import format_seconds

_MOST = 4  # influences named


def interval_text(interval: StepInterval) -> str:
    """`step time 1.2 s, P10 to P90 1.1 s to 1.4 s; most from gemm_fraction of h100-sxm (fitted) -2 % +2 %, ...`"""
    named = ", ".join(_influence(one) for one in interval.influences[:_MOST])
    seconds = f"{format_seconds(interval.p10_s)} to {format_seconds(interval.p90_s)}"
    return f"step time {format_seconds(interval.step_s)}, P10 to P90 {seconds}; most from {named}"


def _influence(one: Influence) -> str:
    number = one.number
    name = "the form of the model" if number.owner == "model" else f"{number.parameter} of {number.of}"
    return f"{name} ({number.kind}) -{one.faster:.1%} +{one.slower:.1%}"


def interval_values(interval: StepInterval) -> dict[str, object]:
    """P10, P90 and all influences, as JSON values."""
    influences = [
        {
            "parameter": one.number.parameter,
            "of": one.number.of,
            "kind": one.number.kind,
            "value": one.number.value,
            "p10": one.number.p10,
            "p90": one.number.p90,
            "slower": one.slower,
            "faster": one.faster,
        }
        for one in interval.influences
    ]
    return {"step_time_p10_s": interval.p10_s, "step_time_p90_s": interval.p90_s, "influences": influences}
