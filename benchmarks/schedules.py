"""Schedules found by the search, against bounds, 1F1B, published rates and the best values known before.

    python benchmarks/schedules.py [-o schedules.csv] [--work 5] [--seeds 0] [--only a16 rows v equal]

One row per problem: cases a to g of uneven multimodal pipelines (`schedule_cases.py`); `rows` and `v` with the profiled
times of the zero-bubble paper (arXiv 2401.10241, tables 3 to 5) by span, one stage per rank or two in V shape; and
`equal` stages. Every row is one default search, whose work is counted: a seed gives the same row on every machine but
for the seconds, `wall_s` and of the processor `cpu_s`. With more seeds the best is written.
"""

import argparse
import csv
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import process_time

from schedule_cases import CASES, chain

from mmplan.planner.schedules.evaluate import evaluate, fits
from mmplan.planner.schedules.families import FAMILIES
from mmplan.planner.schedules.problem import NotApplicable, ScheduleProblem, StageEdge, StageWork
from mmplan.planner.schedules.search.best import SEARCH_S, ScheduleResult, best_schedule

FIELDS = (
    *("problem", "p", "m", "actions", "objective", "value", "other", "bound", "gap", "best_family", "family_value"),
    *("one_f_one_b", "known", "met", "method", "wall_s", "cpu_s", "seeds"),
)
# Best makespans known before for cases a to g, of compiled simulated annealing and CP-SAT in 1 to 60 s each.
KNOWN = {
    "a16": 667.8, "a32": 1272.6, "b16": 502.3, "b32": 937.3, "c16": 561.5, "c32": 996.5, "d16": 472.25, "d32": 805.25,
    "e16": 600.5, "e32": 1138.0, "f16": 767.85, "f32": 1436.2, "g16": 590.0, "g32": 1130.0,
}  # fmt: skip
# arXiv 2401.10241, tables 3 to 5: p, m, F, B, W, hop in ms; calculated bubble of ZB-1p and ZB-2p by span.
ROWS = (
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.1585, 0.0433),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1242, 0.0039),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.0674, 0.0026),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.1323, 0.0029),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1045, 0.0022),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.0554, 0.0010),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.1397, 0.0066),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.1088, 0.0054),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.0576, 0.0028),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.1421, 0.0038),
    (32, 128, 10.408, 10.204, 7.703, 0.408, 0.1106, 0.0029),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 0.0594, 0.0018),
)
# The same times in V shape: p, m, F, B, W, hop, known rates of ZB-V, V-Half, V-Min (Qi et al., arXiv 2405.15362).
V_ROWS = (
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.0703, 0.1702, 0.3353),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.0403, 0.1447, 0.2721),
)
# Microbatches that a rank may hold, of p: whole building blocks need a microbatch and a chunk more than the part.
V_MEMORY = (("zb-v", 1.0, 0.0), ("v-half", 1 / 2, 1.5), ("v-min", 1 / 3, 1.5))


def published_chain(p: int, m: int, f: float, b: float, w: float, hop: float, memory: float) -> ScheduleProblem:
    stages = tuple(
        StageWork(rank=s, forward_s=(f,) * m, input_s=(b,) * m, weight_s=(w,) * m, held=(2.0,) * m) for s in range(p)
    )
    edges = tuple(StageEdge(source=s, target=s + 1, forward_s=hop, backward_s=hop) for s in range(p - 1))
    return ScheduleProblem(stages=stages, edges=edges, microbatches=m, capacity=(memory,) * p)


def v_chain(p: int, m: int, f: float, b: float, w: float, hop: float, memory: float) -> ScheduleProblem:
    """Two chunks per rank, down and up the ranks, each with half of the rank's work."""
    places = [*range(p), *reversed(range(p))]
    half = {"forward_s": (f / 2,) * m, "input_s": (b / 2,) * m, "weight_s": (w / 2,) * m, "held": (1.0,) * m}
    stages = tuple(StageWork(rank=place, **half) for place in places)
    lags = [0.0 if a == b else hop for a, b in itertools.pairwise(places)]
    edges = tuple(StageEdge(source=s, target=s + 1, forward_s=lag, backward_s=lag) for s, lag in enumerate(lags))
    return ScheduleProblem(stages=stages, edges=edges, microbatches=m, capacity=(memory,) * p)


def problems() -> Iterator[tuple[str, ScheduleProblem, bool, float | None]]:
    """Name, problem, whether spans count, and the value known before."""
    for letter, build in CASES.items():
        for m in (16, 32):
            yield f"{letter}{m}", build(m), False, KNOWN[f"{letter}{m}"]
    for p, m, f, b, w, hop, one, two in ROWS:
        for memory, rate in ((1, one), (2, two)):
            problem = published_chain(p, m, f, b, w, hop, 2.0 * p * memory)
            yield f"rows-{p}-{m}-{f}-{memory}p", problem, True, m * (f + b + w) / (1 - rate)
    for p, m, f, b, w, hop, *rates in V_ROWS:
        for (name, part, more), rate in zip(V_MEMORY, rates, strict=True):
            problem = v_chain(p, m, f, b, w, hop, 2 * (part * p + more))
            yield f"v-{p}-{m}-{f}-{name}", problem, True, m * (f + b + w) / (1 - rate)
    for m in (16, 32):
        yield f"equal-{m}", chain([10] * 8, m, 16), False, None


def solve(problem: ScheduleProblem, spans: bool, work_s: float, seeds: Sequence[int]) -> ScheduleResult:
    """The best over the seeds; later ones are left out once the bound is reached."""
    best: ScheduleResult | None = None
    for seed in seeds:
        result = best_schedule(problem, search_s=work_s, seed=seed, spans=spans)
        if not fits(problem, result.schedule):
            raise SystemExit("a schedule exceeds its memory")
        if best is None or _value(result, spans) < _value(best, spans):
            best = result
        if best.gap <= 1e-6:
            break
    assert best is not None
    return best


def _value(result: ScheduleResult, spans: bool) -> float:
    return result.span_s if spans else result.makespan_s


def row(
    name: str,
    problem: ScheduleProblem,
    spans: bool,
    known: float | None,
    result: ScheduleResult,
    cpu_s: float,
    seeds: int,
) -> dict[str, object]:
    families = {method: value for method, value in result.tried if method in FAMILIES and isinstance(value, float)}
    family = min(families, key=lambda method: families[method], default="")
    plain = FAMILIES["1f1b"](problem)
    value = _value(result, spans)
    return {
        "problem": name,
        "p": problem.ranks,
        "m": problem.microbatches,
        "actions": sum(map(len, result.schedule)),
        "objective": "span" if spans else "makespan",
        "value": round(value, 3),
        "other": round(result.makespan_s if spans else result.span_s, 3),
        "bound": round(result.bound_s, 3),
        "gap": f"{result.gap:.4f}",
        "best_family": family,
        "family_value": round(families[family], 3) if family else "",
        "one_f_one_b": "" if isinstance(plain, NotApplicable) else round(evaluate(problem, plain).makespan_s, 3),
        "known": "" if known is None else round(known, 3),
        # published rates have four decimals: half of the last one of the span is theirs
        "met": "" if known is None else value <= known * (1 + (1e-4 if spans else 1e-6)),
        "method": result.method,
        "wall_s": f"{result.wall_s:.1f}",
        "cpu_s": f"{cpu_s:.1f}",
        "seeds": seeds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "schedules.csv")
    parser.add_argument("--work", type=float, default=SEARCH_S, help="of each search, in counted seconds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of problem names")
    options = parser.parse_args()
    with options.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        for name, problem, spans, known in problems():
            if options.only and not any(name.startswith(start) for start in options.only):
                continue
            begun_s = process_time()
            result = solve(problem, spans, options.work, options.seeds)
            found = row(name, problem, spans, known, result, process_time() - begun_s, len(options.seeds))
            writer.writerow(found)
            sys.stdout.write(
                ", ".join(
                    f"{key} {found[key]}"
                    for key in ("problem", "value", "bound", "gap", "known", "met", "wall_s", "cpu_s")
                )
                + "\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
