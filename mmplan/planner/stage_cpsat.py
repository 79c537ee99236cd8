"""The stage cut by CP-SAT: how many groups of each run every stage takes. The second exact method, beside the DP.

Stages are numbered along the edges, so groups of a run lie in non-decreasing stages and counts say everything. An upper
bound is always given: it bounds the busiest stage, without which the search has no grip. One worker and a limit in
deterministic time, so that equal calls give equal answers.

Where the groups of a run are not alike at every level of recomputation, each may have its own level: a relaxation. What
that proves holds for one level per stage; its answers are scored by the definition.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ortools.sat.python import cp_model

from mmplan.planner.cut_problem import CutProblem, evaluate_cut
from mmplan.planner.cut_result import CutResult
from mmplan.planner.floors import bottleneck_floor, busiest_ceiling, finish_floor, heaviest_paths, least_objective
from mmplan.planner.quantise import floor_ns_of_bound
from mmplan.planner.runs import Costs, Run, RunEdge, at_levels, find_runs, options_of
from mmplan.planner.schedules.in_flight import stage_depth

Variable: TypeAlias = cp_model.IntVar
Expression: TypeAlias = cp_model.LinearExpr


@dataclass(frozen=True, kw_only=True, slots=True)
class _Data:
    """Constants of one model."""

    problem: CutProblem
    runs: tuple[Run, ...]
    edges: tuple[RunEdge, ...]
    options: tuple[tuple[Costs, ...], ...]  # of each run: those of one group at each level
    levelled: bool  # options are the levels, and each stage has one
    cutoff_ns: int
    cap_ns: int  # no stage of a cut below the cutoff works longer

    @property
    def stages(self) -> range:
        return range(self.problem.stages)

    @property
    def depths(self) -> range:
        """Depths at which a stage holds more microbatches than the one before."""
        return range(self.problem.least_in_flight + 1, self.problem.most_in_flight + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Variables:
    """Keyed by (run, stage) unless said otherwise.

    count: groups of the run in the stage; way[run, option, stage]: those of them at one option of the run; on:
    there is one; begun, done: the first, the last group lies in this stage or before; tail_from, depth_from: largest
    tail and depth of the stages from this one on that hold a part of the run.
    at[level, stage]: the stage recomputes so. tail, depth by stage; deep[stage, d]: its depth is d or more.
    """

    count: dict[tuple[int, int], Variable]
    at: dict[tuple[int, int], Variable]
    way: dict[tuple[int, int, int], Variable]
    on: dict[tuple[int, int], Variable]
    begun: dict[tuple[int, int], Variable]
    done: dict[tuple[int, int], Variable]
    tail_from: dict[tuple[int, int], Variable]
    depth_from: dict[tuple[int, int], Variable]
    tail: dict[int, Variable]
    depth: dict[int, Variable]
    deep: dict[tuple[int, int], Variable]
    bottleneck: Variable
    path: Variable
    finish: Variable


def cut_by_cpsat(
    problem: CutProblem,
    *,
    cutoff_ns: int,
    hint: Sequence[int] | None = None,
    max_deterministic_time: float = 10.0,
    max_wall_s: float = 3600.0,
    seed: int = 0,
) -> CutResult:
    """The best cut below `cutoff_ns`, or a proof that there is none.

    Args:
        hint: stage of each group in a known cut; it need not be below the cutoff.
        max_deterministic_time: CP-SAT's own unit, about a second; at the limit the bound stays below the cut.
        max_wall_s: a second limit, for callers who may not wait; when it is what ends the search, answers may differ.
    """
    data = _data(problem, cutoff_ns)
    if problem.stages > problem.groups or least_objective(problem) >= cutoff_ns:
        return CutResult(stage_of=None, objective_ns=None, bound_ns=cutoff_ns, exhausted=False)
    model = cp_model.CpModel()
    variables = _variables(model, data)
    _counts_and_order(model, data, variables)
    _stage_loads(model, data, variables)
    _critical_path(model, data, variables)
    _depths(model, data, variables)
    _memory(model, data, variables)
    _finish(model, data, variables)
    objective = (problem.microbatches - 1) * variables.bottleneck + variables.path + variables.finish
    model.add(objective <= cutoff_ns - 1)
    model.minimize(objective)
    if hint is not None:
        _hint(model, data, variables, hint)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.presolve_inclusion_work_limit = 0  # with it OR-Tools 9.15 calls some feasible models infeasible
    solver.parameters.catch_sigint_signal = False  # Ctrl-C is Python's
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = max_deterministic_time
    solver.parameters.max_time_in_seconds = max_wall_s
    return _extract(data, variables, solver, solver.solve(model))


def _data(problem: CutProblem, cutoff_ns: int) -> _Data:
    runs, edges = find_runs(problem)
    cap_ns = busiest_ceiling(problem, cutoff_ns)
    levelled = all(len({at_levels(problem, group) for group in run.groups}) == 1 for run in runs)
    of_group = at_levels if levelled else options_of
    options = tuple(of_group(problem, run.groups[0]) for run in runs)
    return _Data(
        problem=problem,
        runs=runs,
        edges=edges,
        options=options,
        levelled=levelled,
        cutoff_ns=cutoff_ns,
        cap_ns=cap_ns,
    )


def _variables(model: cp_model.CpModel, data: _Data) -> _Variables:
    problem, stages = data.problem, data.stages
    keys = [(run, stage) for run in range(len(data.runs)) for stage in stages]

    def most(run: int) -> int:
        work_ns = problem.work_ns[data.runs[run].groups[0]]
        size = len(data.runs[run].groups)
        return min(size, data.cap_ns // work_ns) if work_ns else size

    def flags(name: str) -> dict[tuple[int, int], Variable]:
        return {key: model.new_bool_var(f"{name}{key}") for key in keys}

    count = {key: model.new_int_var(0, most(key[0]), f"count{key}") for key in keys}
    levels = range(len(problem.choices)) if data.levelled else ()
    at = {(level, stage): model.new_bool_var(f"at{level, stage}") for level in levels for stage in stages}
    for stage in stages if data.levelled else ():
        model.add_exactly_one(at[level, stage] for level in problem.kind(stage).levels)
        for level in set(levels) - set(problem.kind(stage).levels):
            model.add(at[level, stage] == 0)
    return _Variables(
        count=count,
        at=at,
        way=_ways(model, data, count, at),
        on=flags("on"),
        begun=flags("begun"),
        done=flags("done"),
        tail_from={key: model.new_int_var(0, data.cutoff_ns, f"tail_from{key}") for key in keys},
        depth_from={key: model.new_int_var(0, problem.deepest, f"depth_from{key}") for key in keys},
        tail={stage: model.new_int_var(0, data.cutoff_ns, f"tail{stage}") for stage in stages},
        depth={stage: model.new_int_var(1, problem.deepest - stage, f"depth{stage}") for stage in stages},
        deep={(s, d): model.new_bool_var(f"deep{s, d}") for s in stages for d in data.depths},
        bottleneck=model.new_int_var(bottleneck_floor(problem), data.cap_ns, "bottleneck"),
        path=model.new_int_var(max(heaviest_paths(problem).tolist()), data.cutoff_ns, "path"),
        finish=model.new_int_var(finish_floor(problem), data.cutoff_ns, "finish"),
    )


def _ways(
    model: cp_model.CpModel, data: _Data, count: dict[tuple[int, int], Variable], at: dict[tuple[int, int], Variable]
) -> dict[tuple[int, int, int], Variable]:
    """The counts themselves where a run has one option, else variables that add up to them, and the level that each
    stage has where that is what options are."""
    ways: dict[tuple[int, int, int], Variable] = {}
    for (run, stage), variable in count.items():
        options = range(len(data.options[run]))
        if len(options) == 1:
            ways[run, 0, stage] = variable
            continue
        most = len(data.runs[run].groups)
        parts = [model.new_int_var(0, most, f"way{run, option, stage}") for option in options]
        model.add(Expression.sum(parts) == variable)
        ways |= {(run, option, stage): part for option, part in enumerate(parts)}
        for option, part in enumerate(parts):
            if data.levelled:
                model.add(part == 0).only_enforce_if(~at[option, stage])
            elif data.options[run][option] not in _of_kind(data, run, stage):
                model.add(part == 0)
    return ways


def _of_kind(data: _Data, run: int, stage: int) -> set[Costs]:
    """Costs that a group of the run can have in the stage."""
    at_each = at_levels(data.problem, data.runs[run].groups[0])
    return {at_each[level] for level in data.problem.kind(stage).levels}


def _counts_and_order(model: cp_model.CpModel, data: _Data, variables: _Variables) -> None:
    """Every run is used up, no stage is empty, and a run begins only where the runs that feed it are done.

    begun[k, s] = (sum of count[k, <= s] >= 1), done[k, s] = (it is the whole run), begun[k', s] => done[k, s].
    """
    for run, members in enumerate(data.runs):
        size, placed = len(members.groups), Expression.sum([])
        for stage in data.stages:
            placed = placed + variables.count[run, stage]
            on, begun, done = (flags[run, stage] for flags in (variables.on, variables.begun, variables.done))
            model.add(variables.count[run, stage] >= 1).only_enforce_if(on)
            model.add(variables.count[run, stage] == 0).only_enforce_if(~on)
            model.add(placed >= 1).only_enforce_if(begun)
            model.add(placed == 0).only_enforce_if(~begun)
            model.add(placed == size).only_enforce_if(done)
            model.add(placed <= size - 1).only_enforce_if(~done)
            if stage:
                model.add_implication(variables.begun[run, stage - 1], begun)
                model.add_implication(variables.done[run, stage - 1], done)
        model.add(placed == size)
    for stage in data.stages:
        model.add_bool_or([variables.on[run, stage] for run in range(len(data.runs))])
        for edge in data.edges:
            model.add_implication(variables.begun[edge.consumer, stage], variables.done[edge.producer, stage])


def _sum(data: _Data, variables: _Variables, stage: int, of_group: Sequence[int]) -> Expression:
    """Sum of a per-group quantity over the groups of a stage."""
    terms = [variables.count[run, stage] for run in range(len(data.runs))]
    return Expression.weighted_sum(terms, [of_group[members.groups[0]] for members in data.runs])


def _chosen(data: _Data, variables: _Variables, stage: int, which: int) -> Expression:
    """Work (`which` = 0), kept bytes (1), work on a path (2) or encoded bytes (3) of a stage, see `Costs`."""
    keys = [(run, option) for run, options in enumerate(data.options) for option in range(len(options))]
    terms = [variables.way[run, option, stage] for run, option in keys]
    return Expression.weighted_sum(terms, [data.options[run][option][which] for run, option in keys])


def _stage_loads(model: cp_model.CpModel, data: _Data, variables: _Variables) -> None:
    """T_s <= bottleneck."""
    for stage in data.stages:
        model.add(_chosen(data, variables, stage, 0) <= variables.bottleneck)


def _critical_path(model: cp_model.CpModel, data: _Data, variables: _Variables) -> None:
    """tail_s >= path_s + lag + largest tail where the cut tensor is read next; path >= tail_s."""
    for stage in data.stages:
        work_ns = _chosen(data, variables, stage, 2)
        model.add(variables.tail[stage] >= work_ns)
        model.add(variables.path >= variables.tail[stage])
        for run in range(len(data.runs)):
            model.add(variables.tail_from[run, stage] >= variables.tail[stage]).only_enforce_if(
                variables.on[run, stage]
            )
        for cut, lag_ns, reader in _cuts(data, variables, stage):
            later = variables.tail_from[reader, stage + 1]
            model.add(variables.tail[stage] >= work_ns + lag_ns + later).only_enforce_if(cut)
            model.add(variables.tail_from[reader, stage] >= later)


def _depths(model: cp_model.CpModel, data: _Data, variables: _Variables) -> None:
    """depth_s >= 1 + largest depth where a cut tensor is read next, and more where layers run several microbatches at
    once; deep[s, d] = (depth_s >= d)."""
    if not data.depths:
        return
    for stage in data.stages:
        for run in range(len(data.runs)):
            on = variables.on[run, stage]
            model.add(variables.depth_from[run, stage] >= variables.depth[stage]).only_enforce_if(on)
        for cut, _, reader in _cuts(data, variables, stage):
            later = variables.depth_from[reader, stage + 1]
            model.add(variables.depth[stage] >= 1 + later).only_enforce_if(cut)
            for run in _encoded(data):
                ahead = stage_depth(1, data.problem.batch_factor) - 1
                model.add(variables.depth[stage] >= ahead + later).only_enforce_if([*cut, variables.on[run, stage]])
            model.add(variables.depth_from[reader, stage] >= later)
        for depth in data.depths:
            model.add(variables.depth[stage] <= depth - 1).only_enforce_if(~variables.deep[stage, depth])


def _cuts(data: _Data, variables: _Variables, stage: int) -> list[tuple[list[Variable], int, int]]:
    """Literals that together say that a tensor leaves the stage, its lag, and the run that reads it later."""
    if stage == data.problem.stages - 1:
        return []
    inside = [
        ([variables.on[run, stage], ~variables.done[run, stage]], members.lag_ns, run)
        for run, members in enumerate(data.runs)
    ]
    between = [
        (
            [variables.on[e.producer, stage], variables.done[e.producer, stage], ~variables.begun[e.consumer, stage]],
            e.lag_ns,
            e.consumer,
        )
        for e in data.edges
    ]
    return inside + between


def _memory(model: cp_model.CpModel, data: _Data, variables: _Variables) -> None:
    """sum of state + in_flight_s * sum of kept + at work <= capacity, once per number of microbatches in flight."""
    problem = data.problem
    for stage in data.stages:
        state_bytes = _sum(data, variables, stage, problem.state_bytes)
        used_bytes = state_bytes + problem.least_working_bytes
        if data.levelled:
            working = [level.working_bytes for level in problem.choices]
            at = [variables.at[level, stage] for level in range(len(working))]
            used_bytes = state_bytes + Expression.weighted_sum(at, working)
        kept_bytes, encoded_bytes = (_chosen(data, variables, stage, which) for which in (1, 3))
        for depth in (problem.least_in_flight, *data.depths):
            alive, together = problem.held(depth, True)
            held_bytes = alive * kept_bytes + (together - alive) * encoded_bytes
            deep = [] if depth == problem.least_in_flight else [variables.deep[stage, depth]]
            model.add(used_bytes + held_bytes <= problem.kind(stage).capacity_bytes).only_enforce_if(deep)


def _encoded(data: _Data) -> list[int]:
    """Runs whose groups have layers that run several microbatches at once."""
    encoded = data.problem.encoded
    return [run for run, members in enumerate(data.runs) if encoded and encoded[members.groups[0]]]


def _finish(model: cp_model.CpModel, data: _Data, variables: _Variables) -> None:
    """finish >= sum of finish parts + the fixed part where the stage trains anything."""
    problem = data.problem
    for stage in data.stages:
        kind = problem.kind(stage)
        parts = _sum(data, variables, stage, kind.finish_ns) + _tied(model, data, variables, stage)
        model.add(variables.finish >= parts)
        for run, members in enumerate(data.runs):
            if problem.trainable[members.groups[0]]:
                on = variables.on[run, stage]
                model.add(variables.finish >= parts + kind.finish_fixed_ns).only_enforce_if(on)


def _tied(model: cp_model.CpModel, data: _Data, variables: _Variables, stage: int) -> Expression:
    """alone >= one layer of a tied matrix on the stage - the other one there: the stage pays for its sum and copy."""
    run_of = {run.groups[0]: index for index, run in enumerate(data.runs)}
    alone, prices_ns = [], []
    for number, tie in enumerate(data.problem.ties):
        table, head = (variables.on[run_of[group], stage] for group in (tie.table, tie.head))
        for one, other, pays_ns in ((table, head, tie.sum_ns), (head, table, tie.sum_ns + tie.copy_ns)):
            flag = model.new_bool_var(f"alone{number, stage, pays_ns}")
            model.add(flag >= one - other)
            alone.append(flag)
            prices_ns.append(pays_ns)
    return Expression.weighted_sum(alone, prices_ns)


def _hint(model: cp_model.CpModel, data: _Data, variables: _Variables, stage_of: Sequence[int]) -> None:
    for run, members in enumerate(data.runs):
        stages = [stage_of[group] for group in members.groups]
        for stage in data.stages:
            model.add_hint(variables.count[run, stage], stages.count(stage))


def _extract(data: _Data, variables: _Variables, solver: cp_model.CpSolver, status: object) -> CutResult:
    """The cut behind the counts, scored from the definition; a limit leaves CP-SAT's own bound."""
    if status == cp_model.INFEASIBLE:
        return CutResult(stage_of=None, objective_ns=None, bound_ns=data.cutoff_ns, exhausted=False)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
        raise ValueError(f"CP-SAT calls the stage-cut model {solver.status_name(status)}")
    proven_ns = floor_ns_of_bound(solver.best_objective_bound)
    if status == cp_model.UNKNOWN:
        return CutResult(stage_of=None, objective_ns=None, bound_ns=min(proven_ns, data.cutoff_ns), exhausted=True)
    stage_of = [0] * data.problem.groups
    for run, members in enumerate(data.runs):
        counts = [int(solver.value(variables.count[run, stage])) for stage in data.stages]
        placed = [stage for stage in data.stages for _ in range(counts[stage])]
        for group, stage in zip(members.groups, placed, strict=True):
            stage_of[group] = stage
    value = evaluate_cut(data.problem, stage_of)
    if not value.fits or value.objective_ns >= data.cutoff_ns:
        return CutResult(stage_of=None, objective_ns=None, bound_ns=min(proven_ns, data.cutoff_ns), exhausted=True)
    alike = len({level.state_bytes for level in data.problem.choices}) == 1  # else the least is taken for each
    exact = status == cp_model.OPTIMAL and data.levelled and alike
    bound_ns = value.objective_ns if exact else min(proven_ns, value.objective_ns)
    return CutResult(
        stage_of=tuple(stage_of),
        objective_ns=value.objective_ns,
        bound_ns=bound_ns,
        exhausted=bound_ns < value.objective_ns,
    )
