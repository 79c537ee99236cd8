"""What a run.json of `mmplan execute` says about the health of its training.

Losses and skipped updates are in it. With the plan, the recorded step also shows whether each stage began behind the
stages that it reads, and how evenly its features came.
"""

from collections.abc import Iterator, Mapping, Sequence

from mmplan.cost_models.build import build_graph
from mmplan.errors import InputError
from mmplan.planner.plan import Plan
from mmplan.planner.prediction import TimedAction
from mmplan.planner.stage_graph import build_stage_graph
from mmplan.runtime.health import loss, staleness
from mmplan.runtime.health.judge import Judge, Value
from mmplan.runtime.health.loss import LossWatch
from mmplan.runtime.health.readings import Reading
from mmplan.runtime.health.rules import RULES
from mmplan.runtime.measurement import Measurement, plan_hash

_CLOCK_S = 1e-4  # by which clocks of processes on one host may differ in the record


def run_readings(run: Measurement, plan: Plan | None) -> tuple[Reading, ...]:
    """Readings of all steps, and of the recorded one.

    Raises:
        InputError: the plan is not the run's.
    """
    judge, losses = Judge(RULES, 0), LossWatch()
    found = []
    for step in run.steps:
        if step.skipped:
            found.append(judge.reading(step.index, Value(loss.RULE.monitor, "loss", float("nan"), _SKIPPED)))
        elif step.losses:
            total = sum(step.losses.values())
            rise = losses.update(total)
            if rise is not None:
                found.append(judge.reading(step.index, rise.value(total)))
    if plan is not None:
        if plan_hash(plan) != run.plan_hash:
            raise InputError(f"the run is of plan {run.plan_hash}, this plan is {plan_hash(plan)}")
        step_index = run.steps[run.recorded_step].index
        found += [judge.reading(step_index, value) for value in _timing(run, plan)]
    return tuple(found)


_SKIPPED: dict[str, float | str | None] = {"loss": "no number, or a gradient; the update was left out"}


def _timing(run: Measurement, plan: Plan) -> Iterator[Value]:
    if run.rehearsed:
        return
    alone_s: dict[tuple[int, int], float] = {}
    for one in run.transfers:  # the longest between two ranks: a feature is not the smallest of their messages
        alone_s[one.source, one.target] = max(one.seconds, alone_s.get((one.source, one.target), 0.0))
    replicas = {rank.rank: rank.replica for rank in run.ranks}
    asked_s = run.asked_s or [item.start_s for item in run.timeline]
    yield from feature_timing(plan, run.timeline, asked_s, replicas, alone_s=alone_s, one_clock=len(run.hosts) == 1)


def feature_timing(
    plan: Plan,
    timeline: Sequence[TimedAction],
    asked_s: Sequence[float],
    replicas: Mapping[int, int],
    *,
    alone_s: Mapping[tuple[int, int], float],
    one_clock: bool,
) -> Iterator[Value]:
    """Of each edge between stages: starts before the features were made, and jitter behind them.

    Args:
        replicas: of each rank in the timeline.
        alone_s: what the transfer of features between two ranks takes alone; jitter is that of what is beyond.
        one_clock: ranks share a clock, so that a start can be held against an end on another one.
    """
    cuts = build_stage_graph([stage.layers for stage in plan.stages], build_graph(plan.scenario)).cuts
    asked = dict(zip(map(_key, timeline), asked_s, strict=True))
    forwards: dict[tuple[int, int, int], TimedAction] = {}
    for item in timeline:
        if item.action.kind == "F" and item.rank in replicas:
            forwards[replicas[item.rank], item.action.stage, item.action.microbatch] = item
    for source, target in sorted({(cut.source, cut.target) for cut in cuts}):
        ready_s: list[float] = []
        started_s: list[float] = []
        early = 0
        for (replica, stage, microbatch), item in forwards.items():
            made = forwards.get((replica, source, microbatch))
            if stage != target or made is None:
                continue
            early += one_clock and item.start_s < made.end_s - _CLOCK_S
            ready_s.append(max(made.end_s + alone_s.get((made.rank, item.rank), 0.0), asked[_key(item)]))
            started_s.append(max(item.start_s, ready_s[-1]))
        edge = f"stage {source} > stage {target}"
        if not ready_s:
            continue
        detail: dict[str, float | str | None] = {"microbatches": float(len(ready_s))}
        yield Value(staleness.STALE.monitor, edge, float(early), detail)
        yield Value(staleness.JITTER.monitor, edge, staleness.jitter_s(ready_s, started_s), detail)


def _key(item: TimedAction) -> tuple[int, str]:
    return (item.rank, str(item.action))
