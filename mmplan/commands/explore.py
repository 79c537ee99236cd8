"""Commands that plan one scenario many times: over its keys, under new prices, under less memory or fewer devices."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from mmplan.commands.options import (
    Gap,
    JsonFile,
    LongestStep,
    ObjectiveWord,
    PlanFile,
    ScenarioFile,
    ScheduleSearch,
    Seed,
    TimeLimit,
    json_path,
    seconds,
)
from mmplan.files import make_folder, require_folder
from mmplan.planner.stopping import SCHEDULE_SEARCH_S, TIME_LIMIT_S


def sweep(
    scenario: ScenarioFile,
    vary: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=VALUES",
            help="A key of the file: cluster.nodes=1..64 (doubling), 8..64+8 (steps) or 1,2,4; repeatable: every "
            "combination.",
        ),
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the rows as CSV.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the scaling curves as PNG.")] = None,
    worth: Annotated[
        float,
        typer.Option(min=1.0, max=2.0, help="A doubling of devices pays when it brings so many times the speed."),
    ] = 1.5,
    objective: ObjectiveWord = "step-time",
    deadline: LongestStep = None,
    gap: Gap = 0.01,
    time_limit: TimeLimit = TIME_LIMIT_S,
    seed: Seed = 0,
    schedule_search: ScheduleSearch = SCHEDULE_SEARCH_S,
    json_file: JsonFile = None,
) -> None:
    """Plan a scenario at many points: how it scales, where to stop adding devices. Ctrl-C keeps the rows done."""
    from mmplan.planner.objective import objective_of, require_prices
    from mmplan.planner.repeated import Limits
    from mmplan.planner.sweep import interruptible, read_points, solve_points
    from mmplan.report.console import emit
    from mmplan.report.progress import points_progress
    from mmplan.report.sweep import advice_of, sweep_row, with_efficiency
    from mmplan.report.sweep_output import plot_sweep, save_sweep_csv, sweep_document, sweep_tables
    from mmplan.report.traffic_ratio import ratio_jumps
    from mmplan.scenario.document import read_document
    from mmplan.scenario.variations import parse_variation, points

    require_folder(output, plot, json_path(json_file))
    wanted = objective_of(objective, deadline)
    every = read_points(read_document(scenario), points([parse_variation(text) for text in vary]))
    for first in every[:1]:
        if first.scenario is not None:
            require_prices(wanted, first.scenario.cluster, scenario)
    done = []
    own = Limits(gap=gap, time_limit_s=time_limit, seed=seed, schedule_search_s=schedule_search, objective=wanted)
    with (
        points_progress(scenario.stem) as (progress, tell),
        interruptible(replace(own, on_improvement=progress)) as limits,
    ):
        for point in solve_points(every, limits):
            done.append(sweep_row(point))
            tell(f"{len(done)} of {len(every)} points done")
    rows = with_efficiency(done)
    advice = (*advice_of(rows, worth, wanted.name), *ratio_jumps(rows))
    if output is not None:
        save_sweep_csv(rows, output)
    if plot is not None:
        plot_sweep(rows, plot, wanted.name)
    ended = [] if len(rows) == len(every) else [f"interrupted: {len(rows)} of {len(every)} points are done"]
    document = sweep_document(scenario.stem, rows, advice, len(every), wanted.name)
    emit(json_file, document, *sweep_tables(scenario.stem, rows), *advice, *ended)


def replan(
    plan_file: PlanFile,
    profile: Annotated[
        Path, typer.Option(metavar="FILE", help="New prices: of `mmplan calibrate`, or seconds of each modality.")
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the new plan; default: NAME.replanned.plan.json.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps left in the training.")] = None,
    restart: Annotated[
        float, typer.Option(parser=seconds, metavar="TIME", help="Time to stop, save and start again, such as '90 s'.")
    ] = 0.0,
    gap: Gap = 0.01,
    time_limit: TimeLimit = TIME_LIMIT_S,
    seed: Seed = 0,
    schedule_search: ScheduleSearch = SCHEDULE_SEARCH_S,
    json_file: JsonFile = None,
) -> None:
    """Plan again at new prices: what moving to the new plan costs, after how many steps it pays, stay or switch."""
    from mmplan.planner.check import require_structure
    from mmplan.planner.new_prices import weights_doubt, with_profile
    from mmplan.planner.plan import load_plan, save_plan
    from mmplan.planner.repeated import Limits
    from mmplan.planner.replan import ModalityAwarePolicy
    from mmplan.report.alternatives import degrees_text
    from mmplan.report.console import emit
    from mmplan.report.progress import search_progress
    from mmplan.report.replan import replan_document, replan_tables

    require_folder(output, json_path(json_file))
    plan = load_plan(plan_file)
    require_structure(plan)
    name = plan.scenario.name
    scenario = with_profile(plan, profile)
    with search_progress(name) as progress:
        own = Limits(gap=gap, time_limit_s=time_limit, seed=seed, schedule_search_s=schedule_search)
        limits = replace(own, on_improvement=progress)
        result = ModalityAwarePolicy(limits=limits, restart_s=restart, steps=steps).propose(plan, scenario)
    target, doubt = output or Path(f"{name}.replanned.plan.json"), weights_doubt(plan, profile)
    save_plan(result.plan, target)
    tables = replan_tables(result, degrees_text(plan), doubt, target)
    emit(json_file, replan_document(result, doubt), *tables)


def pareto(
    scenario: ScenarioFile,
    against: Annotated[str, typer.Option(help="What the objective is held against: memory, devices or both.")] = "both",
    objective: ObjectiveWord = "step-time",
    deadline: LongestStep = None,
    points: Annotated[int, typer.Option(min=2, max=100, help="Memory goes down in so many steps.")] = 8,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FOLDER", help="Write the plans of the front there.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the fronts as PNG.")] = None,
    gap: Gap = 0.01,
    time_limit: TimeLimit = TIME_LIMIT_S,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Fronts of step time (or another objective) against memory and devices, every point a proven plan; Ctrl-C keeps
    the points done."""
    from mmplan.planner.objective import objective_of, require_prices
    from mmplan.planner.pareto_front import device_front, marked, memory_front
    from mmplan.planner.repeated import Limits
    from mmplan.planner.sweep import interruptible
    from mmplan.report.console import emit
    from mmplan.report.pareto import axes_of, pareto_document, pareto_tables, plot_pareto, save_front
    from mmplan.report.progress import points_progress
    from mmplan.scenario.load import load_scenario

    require_folder(plot, json_path(json_file))
    wanted, loaded, done = objective_of(objective, deadline), load_scenario(scenario), []
    axes = axes_of(against, wanted.name)
    require_prices(wanted, loaded.cluster, scenario)
    own = Limits(gap=gap, time_limit_s=time_limit, seed=seed, objective=wanted)
    if output is not None:
        make_folder(output)
        require_folder(output / "plan")
    with (
        points_progress(loaded.name) as (progress, tell),
        interruptible(replace(own, on_improvement=progress)) as limits,
    ):
        for axis in axes:
            for point in memory_front(loaded, limits, points) if axis == "memory" else device_front(loaded, limits):
                done.append(point)
                tell(f"{len(done)} points done")
        complete = not limits.stop()
    front = marked(done)
    if output is not None:
        save_front(loaded.name, front, output)
    if plot is not None:
        plot_pareto(front, plot)
    ended = [] if complete else [f"interrupted: {len(done)} points are done"]
    emit(json_file, pareto_document(loaded.name, front, complete), *pareto_tables(loaded.name, front), *ended)
