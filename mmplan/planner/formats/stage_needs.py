"""What a plan needs of a framework because of its stages: their graph, what they hold, and in which order they work."""

import re
from collections.abc import Iterator
from itertools import groupby

from mmplan.cost_models.graph import ComputationGraph
from mmplan.planner.plan import Plan, module_of
from mmplan.planner.stage_graph import StageGraph

_FAMILIES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "interleaved 1F1B",
    "looped-bfs": "looped BFS",
    **dict.fromkeys(("zb-h1", "zb-h2", "zb-1p", "zb-2p"), "zero bubble"),
    **dict.fromkeys(("zb-v", "dualpipe-v"), "V-shaped zero bubble"),
}


def stage_needs(plan: Plan, graph: ComputationGraph, stages: StageGraph) -> Iterator[tuple[str, str]]:
    """(need, what of the plan it is)."""
    held = [_modules(plan, stage.layers) for stage in plan.stages]
    languages = {module.name for module in plan.scenario.model.modules if module.kind == "language_model"}
    yield from _mixed(plan)
    if plan.pp == 1:  # stages of one rank are one model in several pieces
        return
    yield "pipeline stages", f"pp={plan.pp}"
    yield from _graph(stages)
    yield from _encoders(plan, held, languages)
    yield from _blocks(plan, languages)
    for index, backward in enumerate(stages.has_backward):
        if not backward:
            yield "stages without backward", f"stage {index} ({' and '.join(held[index])}) is frozen, gets no gradient"
            break
    yield from _tied(plan)
    yield from _order(plan)


def _modules(plan: Plan, layers: tuple[str, ...]) -> tuple[str, ...]:
    """Modules of a stage; projectors count with what they lie beside."""
    projectors = {module.name for module in plan.scenario.model.modules if module.kind == "projector"}
    names = tuple(dict.fromkeys(map(module_of, layers)))
    return tuple(name for name in names if name not in projectors) or names[:1]


def _mixed(plan: Plan) -> Iterator[tuple[str, str]]:
    for row in range(plan.pp):
        names = _modules(plan, tuple(layer for stage in plan.stages_of(row) for layer in plan.stages[stage].layers))
        if len(names) > 1:
            yield "modules that share ranks", f"pipeline rank {row} holds {' and '.join(names)}"
            return


def _graph(stages: StageGraph) -> Iterator[tuple[str, str]]:
    """Anything but a chain has several ends, or a stage that feeds several."""
    count = len(stages.successors)
    fed = {target for targets in stages.successors for target in targets}
    sources, sinks = [s for s in range(count) if s not in fed], [s for s in range(count) if not stages.successors[s]]
    for ends, what in ((sources, "start"), (sinks, "end")):
        if len(ends) > 1:
            yield "branches", f"stages {', '.join(map(str, ends))} {what} side by side"
            break
    for stage, targets in enumerate(stages.successors):
        if len(targets) > 1:
            yield "stages that feed several", f"stage {stage} feeds {', '.join(map(str, targets))}"
            return


def _encoders(plan: Plan, held: list[tuple[str, ...]], languages: set[str]) -> Iterator[tuple[str, str]]:
    if not languages:
        return
    rows = [{name for stage in plan.stages_of(row) for name in held[stage]} for row in range(plan.pp)]
    alone = [row for row, names in enumerate(rows) if not names & languages]
    if alone and len(alone) < plan.pp:
        names = " and ".join(sorted({name for row in alone for name in rows[row]}))
        yield "encoders on ranks of their own", f"{names} on pipeline ranks {_ranges(alone)}"
    for module in plan.scenario.model.modules:
        stages = [i for i, stage in enumerate(plan.stages) if module.name in map(module_of, stage.layers)]
        if module.name not in languages and module.kind != "projector" and len(stages) > 1:
            yield "encoders cut into stages", f"{module.name} is cut into stages {_ranges(stages)}"
            return


def _blocks(plan: Plan, languages: set[str]) -> Iterator[tuple[str, str]]:
    """Blocks of the language model by stage, those of stages without any left out."""
    for name in sorted(languages):
        block = re.compile(rf"{re.escape(name)}\.\d+")
        counts = [count for s in plan.stages if (count := sum(bool(block.fullmatch(layer)) for layer in s.layers))]
        if len(set(counts)) > 1:
            shown = ", ".join(map(str, counts[:12])) + (" ..." if len(counts) > 12 else "")
            yield "uneven stages", f"blocks of {name} by stage: {shown}"
            return


def _tied(plan: Plan) -> Iterator[tuple[str, str]]:
    stage_of = plan.stage_of_layer()
    for module in plan.scenario.model.modules:
        tied = module.vocabulary is not None and module.vocabulary.tied
        table, head = stage_of.get(f"{module.name}.embed"), stage_of.get(f"{module.name}.head")
        if tied and table is not None and head is not None and table != head:
            yield "tied vocabulary over stages", f"one matrix of {module.name} in stages {table} and {head}"


def _order(plan: Plan) -> Iterator[tuple[str, str]]:
    """Placement of several stages on a rank, the family of the schedule, backwards in two parts."""
    count = len(plan.stages)
    if count > plan.pp:
        looped = plan.placement == tuple(stage % plan.pp for stage in range(count))
        which = "stages laid round the ranks" if looped else "stages laid back and forth over the ranks"
        yield which, f"{count} stages on {plan.pp} pipeline ranks"
    family = _FAMILIES.get(plan.schedule)
    yield "free order of actions" if family is None else f"schedule {family}", plan.schedule
    split = [row for row, order in enumerate(plan.orders) if re.search(r"\d[IW]\d", order)]
    if split:
        yield "backwards in two parts", f"pipeline ranks {_ranges(split)}"


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers in short: `0-3, 7`."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
