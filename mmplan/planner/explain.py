"""Why other configurations lose: each runner-up with its best cut, term by term against the winner."""

from collections.abc import Callable, Mapping

from mmplan.planner.bounds import NEVER
from mmplan.planner.configuration import Configuration
from mmplan.planner.cut_plan import StepTime, cut_stages
from mmplan.planner.result import RunnerUp
from mmplan.planner.space import Answer, Space, solve_configuration
from mmplan.units import format_seconds

RUNNER_UPS = 8
# Runner-ups are cut to this tolerance only; their terms are for reading.
TOLERANCE = 0.01


def list_runner_ups(
    space: Space, winner: Configuration, time: StepTime, answers: Mapping[int, Answer], ended: Callable[[], bool]
) -> tuple[RunnerUp, ...]:
    """The configurations with the least lower bounds besides the winner's, best first; fewer when time runs out."""
    promise = {
        index: max(int(space.bounds_ns[index]), answers[index].bound_ns if index in answers else 0)
        for index in range(len(space.configurations))
        if space.configurations[index] != winner and space.bounds_ns[index] != NEVER
    }
    found: list[RunnerUp] = []
    for index in sorted(promise, key=lambda index: (promise[index], index))[:RUNNER_UPS]:
        if ended():
            break
        configuration = space.configurations[index]
        answer = solve_configuration(
            space, configuration, cutoff_ns=None, tolerance=TOLERANCE, cpsat_time=0, stop=ended
        )
        if answer.stages is not None:
            found.append(_compared(space, configuration, answer.stages, time))
        elif answer.unfit:
            found.append(
                RunnerUp(
                    configuration=configuration,
                    objective_s=None,
                    repeat_more_s=0.0,
                    fill_more_s=0.0,
                    finish_more_s=0.0,
                    reason="no cut fits into memory",
                )
            )
    return tuple(sorted(found, key=lambda one: (one.objective_s is None, one.objective_s or 0.0)))


def _compared(
    space: Space, configuration: Configuration, stages: tuple[tuple[str, ...], ...], winner: StepTime
) -> RunnerUp:
    _, time = cut_stages(space.prices, configuration, stages)
    terms = {
        "repeating the busiest stage": time.repeat_s - winner.repeat_s,
        "filling and draining the pipeline": time.critical_path_s - winner.critical_path_s,
        "reducing gradients and updating": time.finish_s - winner.finish_s,
    }
    repeat_more_s, fill_more_s, finish_more_s = terms.values()
    return RunnerUp(
        configuration=configuration,
        objective_s=time.objective_s,
        repeat_more_s=repeat_more_s,
        fill_more_s=fill_more_s,
        finish_more_s=finish_more_s,
        reason=_sentence(time.objective_s - winner.objective_s, terms),
    )


def _sentence(more_s: float, terms: dict[str, float]) -> str:
    """`120 ms slower: repeating the busiest stage +150 ms, filling and draining the pipeline -30 ms`."""
    told = [
        f"{name} {'+' if term_s > 0 else '-'}{format_seconds(abs(term_s))}"
        for name, term_s in sorted(terms.items(), key=lambda item: -abs(item[1]))
        if abs(term_s) >= 0.05 * max(abs(more_s), max(map(abs, terms.values())))
    ]
    verdict = f"{format_seconds(more_s)} slower" if more_s >= 0 else f"{format_seconds(-more_s)} faster, within the gap"
    return f"{verdict}: {', '.join(told)}" if told else verdict
