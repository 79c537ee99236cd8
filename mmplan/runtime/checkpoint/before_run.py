"""What can be said of a run's checkpoints before any process starts. Imports no torch."""

import math
import shutil
from pathlib import Path

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import FP32_BYTES
from mmplan.cost_models.memory_states import layer_counts
from mmplan.cost_models.planned_memory import unsent_bytes
from mmplan.cost_models.shard import Shard
from mmplan.errors import InputError
from mmplan.files import make_folder
from mmplan.planner.plan import Plan, load_plan
from mmplan.runtime.checkpoint.folder import (
    Damaged,
    committed,
    lock,
    passed_over,
    read_manifest,
    renamed,
    require_sizes,
    require_whole,
)
from mmplan.runtime.checkpoint.identity import difference
from mmplan.runtime.checkpoint.manifest import PLAN, Manifest
from mmplan.runtime.measurement import plan_hash
from mmplan.runtime.run_options import RunOptions
from mmplan.scenario.scenario import DTYPE_BYTES
from mmplan.units import format_bytes

QUICK_BYTES = 10**9  # of one checkpoint, read before a run starts: about a second
_MOMENTS = {"adamw": 2, "sgd": 0}


def check_checkpoints(plan: Plan, options: RunOptions) -> None:
    """Make the folder, if there is to be one.

    Raises:
        InputError: it cannot be written to, has too little room or checkpoints of another run; or the run cannot go on
            from what it is told to.
    """
    asked = options.checkpoints
    if asked.folder is None and asked.resume is None:
        if asked.every is not None:
            raise InputError(f"a checkpoint every {asked.every} steps needs a folder: --checkpoint FOLDER")
        return
    if options.rehearse:
        raise InputError("a rehearsal sleeps instead of computing: it has no checkpoints")
    if asked.resume is not None:
        _check_resume(asked.resume, plan, options)
    if asked.folder is not None:
        make_folder(asked.folder)
        lock(asked.folder).close()
        there = committed(asked.folder)
        if there and asked.resume != asked.folder:
            raise InputError(
                f"there are checkpoints already (up to {there[0].name}): go on from them with --resume, or name a new "
                "folder",
                file=asked.folder,
            )
        _require_room(asked.folder, plan, options, len(there))


def checkpoint_bytes(plan: Plan) -> int:
    """Of the tensors in one checkpoint: trained weights and their moments in fp32, frozen weights as they are."""
    scenario = plan.scenario
    layers = build_graph(scenario).layers()
    counts = [layer_counts(layer, Shard(), tied_here=True) for layer in layers]
    trained = sum(count.trained for count in counts)
    widths = [DTYPE_BYTES[scenario.precision_of(layer)] for layer in layers]
    frozen = sum((count.total - count.trained) * width for count, width in zip(counts, widths, strict=True))
    per_trained = FP32_BYTES * (1 + _MOMENTS[scenario.optimizer.name])
    return trained * per_trained + frozen


def unsaid_bytes(plan: Plan) -> int:
    """Of what all ranks may have yet to say of compressed gradients."""
    scenario = plan.scenario
    graph, total = build_graph(scenario), 0
    for index, stage in enumerate(plan.stages):
        layers = [graph.layer(layer) for layer in stage.layers]
        each = sum(unsent_bytes(layer, scenario.technique, plan.layout(index)) for layer in layers)
        total += len(plan.stage_ranks(index)) * each
    return total


def require_same_training(path: Path, manifest: Manifest, plan: Plan, *, job: bool) -> None:
    """Raise InputError, with what differs, unless the plan trains what the checkpoint has trained."""
    if manifest.job != job:
        models = {True: "a model of the user's own (--job)", False: "the scenario's model, built here"}
        raise InputError(f"the checkpoint is of {models[manifest.job]}, this run trains {models[job]}", file=path)
    different = difference(load_plan(path / PLAN), plan)
    if different is not None:
        raise InputError(f"the checkpoint is of another training: {different}", file=path)


def drops_unsaid(path: Path, manifest: Manifest, plan: Plan) -> bool:
    """Whether a checkpoint has what ranks had not said of compressed gradients, and the plan cannot go on from it."""
    compressed = load_plan(path / PLAN).scenario.technique.compression != "none"
    return compressed and manifest.plan_hash != plan_hash(plan)


def _check_resume(folder: Path, plan: Plan, options: RunOptions) -> None:
    """Of the newest checkpoint that is whole as far as can be told soon; the ranks read the bytes of large ones."""
    damaged: list[str] = []
    for path in committed(folder):
        try:
            manifest = read_manifest(path)
            quick = manifest.total_bytes <= QUICK_BYTES
            (require_whole if quick else require_sizes)(path, manifest, manifest.files)
        except Damaged as error:
            damaged.append(f"{path.name}: {error}")
            continue
        require_same_training(path, manifest, plan, job=options.job is not None)
        return
    others = "".join(f"; '{path.name}' is passed over: {passed_over(path)}" for path in renamed(folder))
    if damaged:
        raise InputError(f"no checkpoint is whole: {'; '.join(damaged)}{others}", file=folder)
    if options.checkpoints.required:
        raise InputError(f"there is no checkpoint to go on from{others}", file=folder)


def _require_room(folder: Path, plan: Plan, options: RunOptions, there: int) -> None:
    """The newest `keep` stay while one more is written."""
    asked = options.checkpoints
    saves = 1 if asked.every is None else math.ceil(options.steps / asked.every)
    count = max(1, min(there + saves, asked.keep + 1) - there)
    size, free = checkpoint_bytes(plan) + unsaid_bytes(plan), shutil.disk_usage(folder).free
    if count * size > free:
        total = f"{count} x {format_bytes(size)} = {format_bytes(count * size)}"
        raise InputError(
            f"checkpoints need {total} (--keep {asked.keep}, and one being written), {format_bytes(free)} are free",
            file=folder,
        )
