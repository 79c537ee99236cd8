"""Runs of equal groups in a row: what CP-SAT counts per stage instead of placing group by group."""

from dataclasses import dataclass

from mmplan.planner.cut_problem import CutEdge, CutProblem


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Groups in topological order, each feeding only the next and fed only by the one before, with equal costs.

    `lag_ns` is paid per cut inside the run. Only the first group has other producers, only the last other consumers.
    """

    groups: tuple[int, ...]
    lag_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEdge:
    """From the last group of run `producer` to the first of run `consumer`."""

    producer: int
    consumer: int
    lag_ns: int


def find_runs(problem: CutProblem) -> tuple[tuple[Run, ...], tuple[RunEdge, ...]]:
    """The maximal runs, by first group, and the edges between them."""
    into: dict[int, list[CutEdge]] = {group: [] for group in range(problem.groups)}
    out: dict[int, list[CutEdge]] = {group: [] for group in range(problem.groups)}
    for edge in problem.edges:
        into[edge.consumer].append(edge)
        out[edge.producer].append(edge)
    runs: list[list[int]] = []
    lags_ns: list[int] = []
    run_of: dict[int, int] = {}
    for group in range(problem.groups):
        before = into[group][0] if len(into[group]) == 1 else None
        if (
            before is not None
            and len(out[before.producer]) == 1
            and _costs(problem, before.producer) == _costs(problem, group)
        ):
            run = run_of[before.producer]
            if len(runs[run]) == 1 or lags_ns[run] == before.lag_ns:
                runs[run].append(group)
                lags_ns[run], run_of[group] = before.lag_ns, run
                continue
        run_of[group] = len(runs)
        runs.append([group])
        lags_ns.append(0)
    between = tuple(
        RunEdge(producer=run_of[edge.producer], consumer=run_of[edge.consumer], lag_ns=edge.lag_ns)
        for edge in problem.edges
        if run_of[edge.producer] != run_of[edge.consumer]
    )
    found = tuple(Run(groups=tuple(groups), lag_ns=lag_ns) for groups, lag_ns in zip(runs, lags_ns, strict=True))
    return found, between


Costs = tuple[int, int, int, int]  # work, kept, path, encoded: see `cut_problem.Level`


def at_levels(problem: CutProblem, group: int) -> tuple[Costs, ...]:
    """Of a group at each level of recomputation."""
    none = (0,) * problem.groups
    return tuple(
        (
            level.work_ns[group],
            level.kept_bytes[group],
            (level.path_ns or level.work_ns)[group],
            (level.encoded_bytes or none)[group],
        )
        for level in problem.choices
    )


def options_of(problem: CutProblem, group: int) -> tuple[Costs, ...]:
    """The same, each once."""
    return tuple(sorted(set(at_levels(problem, group))))


def _costs(problem: CutProblem, group: int) -> tuple[object, ...]:
    return (
        options_of(problem, group),
        tuple((level.state_bytes or problem.state_bytes)[group] for level in problem.choices),
        problem.finish_ns[group],
        tuple(kind.finish_ns[group] for kind in problem.kinds),
        problem.trainable[group],
        group if any(group in (tie.table, tie.head) for tie in problem.ties) else -1,
        problem.encoded[group : group + 1],
    )
