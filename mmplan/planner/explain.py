"""Why other configurations lose: each runner-up with a good cut, term by term against the winner."""

from collections.abc import Mapping

from mmplan.planner.configuration import Configuration
from mmplan.planner.cut_plan import StepTime
from mmplan.planner.objective import Scale
from mmplan.planner.result import RunnerUp
from mmplan.planner.rivals import Candidate
from mmplan.units import format_seconds

# Terms below this share of the largest one are left out of the sentence: they would not change its meaning.
SMALLEST_TERM = 0.05


def list_runner_ups(
    winner: Candidate, rivals: Mapping[Configuration, Candidate | None], scale: Scale
) -> tuple[RunnerUp, ...]:
    """The rivals, best first, those without a cut last."""
    found = [
        RunnerUp(
            configuration=configuration,
            objective_s=None,
            repeat_more_s=0.0,
            fill_more_s=0.0,
            finish_more_s=0.0,
            reason="no cut fits into memory",
        )
        if rival is None
        else _compared(rival, winner, scale)
        for configuration, rival in rivals.items()
    ]
    return tuple(sorted(found, key=lambda one: (one.objective_s is None, one.objective_s or 0.0)))


def _compared(rival: Candidate, winner: Candidate, scale: Scale) -> RunnerUp:
    time = rival.time
    repeat_more_s, fill_more_s, finish_more_s = _more(time, winner.time).values()
    return RunnerUp(
        configuration=rival.configuration,
        objective_s=time.objective_s,
        repeat_more_s=repeat_more_s,
        fill_more_s=fill_more_s,
        finish_more_s=finish_more_s,
        reason=why_slower(time, winner.time, _if_faster(rival, winner, scale)),
    )


def _if_faster(rival: Candidate, winner: Candidate, scale: Scale) -> str:
    """What is said of a rival with a shorter step: by what part of the winner's its value is more."""
    values = [scale.value_of(one.configuration, one.step_ns) for one in (rival, winner)]
    if scale.weights is None or values[0] <= values[1]:
        return "faster, within the gap"
    return f"faster, for {values[0] / values[1] - 1:.1%} more of what is minimised"


def why_slower(time: StepTime, winner: StepTime, faster: str = "faster, within the gap") -> str:
    """The terms in which a step is longer or shorter than the winner's, in one sentence."""
    return _sentence(time.objective_s - winner.objective_s, _more(time, winner), faster)


def _more(time: StepTime, winner: StepTime) -> dict[str, float]:
    return {
        "repeating the busiest stage": time.repeat_s - winner.repeat_s,
        "filling and draining the pipeline": time.critical_path_s - winner.critical_path_s,
        "reducing gradients and updating": time.finish_s - winner.finish_s,
    }


def _sentence(more_s: float, terms: dict[str, float], faster: str) -> str:
    """`120 ms slower: repeating the busiest stage +150 ms, filling and draining the pipeline -30 ms`."""
    told = [
        f"{name} {'+' if term_s > 0 else '-'}{format_seconds(abs(term_s))}"
        for name, term_s in sorted(terms.items(), key=lambda item: -abs(item[1]))
        if abs(term_s) >= SMALLEST_TERM * max(abs(more_s), max(map(abs, terms.values())))
    ]
    verdict = f"{format_seconds(more_s)} slower" if more_s >= 0 else f"{format_seconds(-more_s)} {faster}"
    return f"{verdict}: {', '.join(told)}" if told else verdict
