"""The command that writes launch files."""

import os
from pathlib import Path
from typing import Annotated

import typer

from mmplan.commands.options import JsonFile, PlanFile, json_path, refuse_without_effect
from mmplan.files import require_folder


def launch(
    context: typer.Context,
    plan_file: PlanFile,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- OPTIONS]", help="Options of mmplan execute, behind --.")
    ] = None,
    launcher: Annotated[str, typer.Option("--for", metavar="LAUNCHER", help="torchrun, slurm or kubernetes.")] = (
        "torchrun"
    ),
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File, or folder for several; default: to stdout.")
    ] = None,
    hosts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The hosts: a hostfile, or a node list of Slurm.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes that there are; default: as in the plan.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="Devices of each.")] = None,
    setup: Annotated[
        list[str] | None, typer.Option(metavar="LINE", help="Shell line to run on each node first; repeatable.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Container image (kubernetes).")] = None,
    claim: Annotated[
        str | None, typer.Option(metavar="NAME", help="Volume claim to work and write results in (kubernetes).")
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(
            min=0, help="How often a failed run starts again; default: 3 with --checkpoint, --every, --resume."
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Write what starts a plan on its cluster; refuse machines that it was not made for, saying how they differ."""
    from mmplan.commands.execute_options import execute_options, restarts_of
    from mmplan.planner.check import require_structure
    from mmplan.planner.plan import load_plan
    from mmplan.report.console import emit
    from mmplan.report.formats import export_parts, launch_document, write_export
    from mmplan.runtime.formats.job import launch_job
    from mmplan.runtime.formats.launch_files import launch_files
    from mmplan.runtime.machines import found_machines, require_machines

    kubernetes = (launcher == "kubernetes", "--for kubernetes")
    refuse_without_effect(context, {"image": kubernetes, "claim": kubernetes})
    require_folder(json_path(json_file))
    plan, options = load_plan(plan_file), execute_options(arguments or [])
    require_structure(plan)
    job = launch_job(
        plan,
        str(plan_file),
        arguments=options.arguments,
        setup=tuple(setup or ()),
        rehearse=options.rehearse,
        restarts=restarts_of(options, restarts),
    )
    machines = found_machines(plan, hosts, nodes, gpus_per_node, os.environ if launcher != "kubernetes" else {})
    if machines is not None:
        require_machines(plan, job, machines)
    made = launch_files(plan, job, launcher, hosts=machines.hosts if machines else (), image=image, claim=claim)
    written = write_export(made, output)
    emit(json_file, launch_document(job, made, written), *export_parts(made, written))
