"""The same placement problem as a CP-SAT model: the second exact method, and the one for DAGs of too many downsets.

`by[g, s]`: group g is on stage s or before. `pays[n, s]`: stage s holds some of net n, but not all. `on_cpu[s]`: stage
s is a CPU. It needs the bound of the dynamic program on both sides to be fast, and one worker to be repeatable.
"""

from dataclasses import dataclass
from typing import TypeAlias

from ortools.sat.python import cp_model

from mmplan.planner.partition.groups import GroupAnswer, GroupPlacement, GroupProblem
from mmplan.planner.quantise import floor_ns_of_bound
from mmplan.planner.stopping import Deadline

Variable: TypeAlias = cp_model.IntVar
Expression: TypeAlias = cp_model.LinearExpr


@dataclass(frozen=True, kw_only=True, slots=True)
class _Model:
    """Variables by meaning; the last stage needs no `by`."""

    problem: GroupProblem
    cp: cp_model.CpModel
    stages: range
    by: dict[tuple[int, int], Variable]
    pays: dict[tuple[int, int], Variable]
    on_cpu: list[Variable]
    busiest: Variable

    def here(self, group: int, stage: int) -> Expression:
        """1 when the group is on the stage, else 0."""
        by_now = self.by[group, stage] if stage < self.stages[-1] else 1
        return by_now - (self.by[group, stage - 1] if stage else 0)


def place_by_cpsat(problem: GroupProblem, low_ps: int, high_ps: int, deadline: Deadline) -> GroupAnswer:
    """The best placement of busiest load `low_ps` (a proven bound) to `high_ps`, or a proof that there is none.

    Raises:
        ValueError: the model was refused, which is a bug.
    """
    if low_ps > high_ps:
        return GroupAnswer(found=None, bound_ps=low_ps)
    model = _make_model(problem, low_ps, high_ps)
    _keep_order(model)
    _count_devices(model)
    _pay_cut_nets(model)
    _limit_loads(model)
    _limit_memory(model)
    model.cp.minimize(model.busiest)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # Ctrl-C is Python's
    solver.parameters.max_time_in_seconds = deadline.left_s
    # OR-Tools 9.15 presolves some of these models to wrong answers (a feasible one to INFEASIBLE, even with other
    # units), by its search for included constraints; without presolve it is right, and as fast.
    solver.parameters.cp_model_presolve = False
    return _extract(model, solver, solver.solve(model.cp), low_ps, high_ps)


def _make_model(problem: GroupProblem, low_ps: int, high_ps: int) -> _Model:
    cp = cp_model.CpModel()
    stages = range(problem.accelerators + problem.cpus)
    groups, nets = range(problem.groups), range(len(problem.nets))
    return _Model(
        problem=problem,
        cp=cp,
        stages=stages,
        by={(g, s): cp.new_bool_var(f"by_{g}_{s}") for g in groups for s in stages[:-1]},
        pays={(n, s): cp.new_bool_var(f"pays_{n}_{s}") for n in nets for s in stages},
        on_cpu=[cp.new_bool_var(f"on_cpu_{s}") for s in stages],
        busiest=cp.new_int_var(low_ps, high_ps, "busiest_ps"),
    )


def _extract(model: _Model, solver: cp_model.CpSolver, status: int, low_ps: int, high_ps: int) -> GroupAnswer:
    if status == cp_model.MODEL_INVALID:
        raise ValueError(f"CP-SAT refused the model: {model.cp.validate()}")
    if status == cp_model.INFEASIBLE:
        return GroupAnswer(found=None, bound_ps=high_ps + 1)
    bound_ps = max(low_ps, floor_ns_of_bound(solver.best_objective_bound))
    if status == cp_model.UNKNOWN:
        return GroupAnswer(found=None, bound_ps=bound_ps)
    groups = range(model.problem.groups)
    value_ps = int(solver.value(model.busiest))
    found = GroupPlacement(
        stage_of=tuple(sum(not solver.boolean_value(model.by[g, s]) for s in model.stages[:-1]) for g in groups),
        on_cpu=tuple(bool(solver.boolean_value(literal)) for literal in model.on_cpu),
        value_ps=value_ps,
    )
    return GroupAnswer(found=found, bound_ps=value_ps if status == cp_model.OPTIMAL else min(bound_ps, value_ps))


def _keep_order(model: _Model) -> None:
    """by[g, s] <= by[g, s + 1]; u before v: by[v, s] <= by[u, s]."""
    for (group, stage), literal in model.by.items():
        if (group, stage + 1) in model.by:
            model.cp.add_implication(literal, model.by[group, stage + 1])
    for producer, consumer in model.problem.edges:
        for stage in model.stages[:-1]:
            model.cp.add_implication(model.by[consumer, stage], model.by[producer, stage])


def _count_devices(model: _Model) -> None:
    """As many CPU stages as CPUs; any stage may stay empty."""
    model.cp.add(sum(model.on_cpu) == model.problem.cpus)


def _pay_cut_nets(model: _Model) -> None:
    """pays[n, s] >= here[i, s] - here[j, s] around the cycle of the groups of net n."""
    for (index, stage), literal in model.pays.items():
        groups = model.problem.nets[index].groups
        for group, following in zip(groups, (*groups[1:], groups[0]), strict=True):
            model.cp.add(literal >= model.here(group, stage) - model.here(following, stage))


def _limit_loads(model: _Model) -> None:
    """Compute and transfers of an accelerator, compute of a CPU: at most the busiest load."""
    problem = model.problem
    for stage, on_cpu in enumerate(model.on_cpu):
        here = [model.here(group, stage) for group in range(problem.groups)]
        work = sum(cost * place for cost, place in zip(problem.accelerator_ps, here, strict=True))
        work += sum(net.cost_ps * model.pays[index, stage] for index, net in enumerate(problem.nets))
        cpu_work = sum(cost * place for cost, place in zip(problem.cpu_ps, here, strict=True))
        model.cp.add(work <= model.busiest).only_enforce_if(~on_cpu)
        model.cp.add(cpu_work <= model.busiest).only_enforce_if(on_cpu)
        for group, place in enumerate(here):
            if problem.needs_cpu[group]:
                model.cp.add(place == 0).only_enforce_if(~on_cpu)
            if problem.needs_accelerator[group]:
                model.cp.add(place == 0).only_enforce_if(on_cpu)


def _limit_memory(model: _Model) -> None:
    """Bytes of an accelerator: at most its capacity."""
    problem = model.problem
    if problem.capacity_bytes is None:
        return
    for stage, on_cpu in enumerate(model.on_cpu):
        held = sum(problem.size_bytes[group] * model.here(group, stage) for group in range(problem.groups))
        model.cp.add(held <= problem.capacity_bytes).only_enforce_if(~on_cpu)
