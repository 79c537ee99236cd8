"""What a plan needs in order to run: processes, and what this release can execute at all. Imports no torch."""

import os
import re
from collections import Counter

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.expert_ops import Dispatch
from mmplan.cost_models.head_groups import HeadGroups
from mmplan.cost_models.layer import splits_rows
from mmplan.cost_models.ops import Positions
from mmplan.errors import ImpossibleError, InputError
from mmplan.planner.check_degrees import check_exchange
from mmplan.planner.lower import stage_gradient_bytes
from mmplan.planner.plan import Plan
from mmplan.planner.plan_technique import require_executable, without
from mmplan.planner.schedules.plan_problem import is_whole
from mmplan.runtime.ghost.refusals import refuse_plan
from mmplan.runtime.places import mesh_of_row, widths
from mmplan.scenario.scenario import Scenario, Transformer
from mmplan.units import format_bytes


def process_count(plan: Plan, *, rehearse: bool, own_model: bool = False) -> int:
    """Processes that a run of the plan takes, those without work between others included; in a rehearsal one stands for
    each group that shares layers.

    Args:
        own_model: it runs a model of the user's own, which is asked itself what its layers do with rows.

    Raises:
        InputError: the plan is to be run for real, and splits heads, recomputes in a way or was made for a technique
            that the runtime does not do.
    """
    if rehearse:
        return len(widths(plan))
    _refuse_together(plan)
    require_executable(plan.scenario)
    _refuse_split_modules(plan, own_model=own_model)
    _refuse_split_sequences(plan)
    if own_model:
        refuse_plan(plan)
    else:
        _refuse_split_rows(plan)
    _refuse_mixed_readers(plan)
    _refuse_recomputation(plan, own_model)
    _refuse_split_backwards(plan)
    return plan.world


def why_not_executed(plan: Plan) -> str | None:
    """What the runtime would say of running the scenario's model by this plan; None where it or a job runs it."""
    try:
        process_count(plan, rehearse=False)
        if plan.scenario.model.recorded is None:  # it was recorded from the job that runs it
            refuse_forms(plan.scenario)
    except InputError as error:
        return str(error)
    return None


def _refuse_together(plan: Plan) -> None:
    for module in plan.scenario.model.modules:
        moe = None if module.transformer is None else module.transformer.moe
        if module.name in plan.together and moe is not None and moe.capacity_factor is not None:
            raise InputError(
                f"'{module.name}' drops tokens beyond an expert's capacity and the plan runs {plan.batch_factor} "
                "microbatches of it at once, whose tokens would drop each other: take it out of "
                "`constraints.encode_together`, or rehearse the plan"
            )


def refuse_forms(scenario: Scenario) -> None:
    """InputError where the scenario's model, which the runtime builds, has layers as steps (a job's own may)."""
    if scenario.model.recorded is not None:
        raise InputError(
            f"'{scenario.model.name}' was recorded from a job, which has its code and its data: run it with `--job`, "
            "or rehearse the plan"
        )
    for module in scenario.model.modules:
        if module.form is not None:
            raise InputError(
                f"'{module.name}' has layers that this release prices and does not build (convolutions, queries): run "
                "the model itself with `--job`, or rehearse the plan"
            )
        if module.vocabulary is not None and module.vocabulary.elsewhere:
            raise InputError(
                f"'{module.name}' reads the token table of another module, which this release prices and does not "
                "build: run the model itself with `--job`, or rehearse the plan"
            )


def _refuse_split_modules(plan: Plan, *, own_model: bool) -> None:
    """What ranks that share layers would have to exchange besides sums of rows."""
    tp_of = {name: mesh.tp for mesh in plan.meshes for name in mesh.modules}
    for module in plan.scenario.model.modules:
        shape, tp = module.transformer, tp_of.get(module.name, plan.tp)
        if module.name in plan.spread or tp == 1:
            continue
        moe = None if shape is None else shape.moe
        if moe is not None and moe.capacity_factor is not None and plan.ep > 1 and plan.etp < plan.tp:
            raise InputError(
                f"'{module.name}' drops tokens beyond an expert's capacity and the plan deals tokens out over "
                f"tp={plan.tp} ranks with etp={plan.etp}, so that each would count its own: set `constraints.etp: "
                f"[{plan.tp}]`, or rehearse the plan"
            )
        if shape is not None and shape.qk_norm_whole and shape.norm == "layer":
            raise InputError(
                f"'{module.name}' takes mean and variance over all heads and the plan splits them over tp={tp}, "
                "which this release does not execute: set `constraints.tp: [1]`, or rehearse the plan"
            )
        for part in () if shape is None or shape.mla is not None else shape.shapes():
            if part.delta is None and part.kv_heads % tp:
                _refuse_repeated_heads(module.name, part, tp, own_model=own_model)


def _refuse_repeated_heads(name: str, shape: Transformer, tp: int, *, own_model: bool) -> None:
    """Heads that tp does not divide run in built-in models, but for norms that would count copies of a head twice."""
    copies = HeadGroups(shape.heads, shape.kv_heads).copies(tp)
    if own_model and shape.kv_heads != shape.heads:
        raise InputError(
            f"'{name}' has {shape.kv_heads} key-value heads for tp={tp}, and this release repeats heads of built-in "
            "models alone: set `constraints.tp` to a divisor, or rehearse the plan"
        )
    if shape.qk_norm_whole and shape.kv_heads > 1 and copies > 1:
        raise InputError(
            f"'{name}' takes a norm over all {shape.kv_heads} key heads, of which tp={tp} lays each on {copies} ranks, "
            "and this release executes that on one: set `constraints.tp` to a divisor, or rehearse the plan"
        )


def _refuse_split_sequences(plan: Plan) -> None:
    """Sequence parallelism gives ranks rows of language models; who reads an encoder reads all of its rows."""
    tp_of = {name: mesh.tp for mesh in plan.meshes for name in mesh.modules}
    for module in plan.scenario.model.modules:
        is_text = module.modality in ("text", "speech") and module.kind != "language_model"
        split = tp_of.get(module.name, plan.tp) > 1 and module.name not in plan.spread
        if plan.scenario.technique.sequence_parallel and is_text and split:
            raise InputError(
                f"the plan has sequence_parallel over tp={tp_of.get(module.name, plan.tp)}, and '{module.name}' is an "
                "encoder of text, whose rows this release does not split so: "
                f"{without(plan.scenario, 'sequence_parallel')} and optimize again, or rehearse the plan"
            )


def _refuse_split_rows(plan: Plan) -> None:
    """What rows that lie on several cp ranks would need besides keys and values."""
    if plan.cp == 1:
        return
    model = plan.scenario.model
    if plan.scenario.technique.context_parallel == "all-to-all":
        for module in model.modules:
            if module.kind == "language_model":
                try:
                    check_exchange(module, plan.tp, plan.cp)
                except ImpossibleError as error:
                    raise InputError(f"{error}, or rehearse the plan") from error
    own = {name for mesh in plan.meshes for name in mesh.modules}
    for layer in build_graph(plan.scenario).layers():
        if layer.module in own:
            continue
        if splits_rows(layer) and model.module(layer.module).kind != "language_model":
            raise InputError(_of_cp(plan, f"'{layer.module}' is an encoder of text, whose rows they split"))
        if splits_rows(layer) and any(isinstance(op, Positions) for op in layer.ops):
            raise InputError(_of_cp(plan, f"'{layer.module}' has learned positions"))
        dispatch = [op for op in layer.ops if isinstance(op, Dispatch)]
        if any(op.capacity is not None for op in dispatch):
            raise InputError(_of_cp(plan, f"'{layer.module}' drops tokens beyond an expert's capacity"))


def _refuse_mixed_readers(plan: Plan) -> None:
    """A tensor crosses to another stage as rows of each rank, or whole."""
    graph, stage_of = build_graph(plan.scenario), plan.stage_of_layer()
    readers: dict[tuple[str, int], set[bool]] = {}
    layouts = [plan.layout(stage) for stage in range(len(plan.stages))]
    for edge in graph.edges():
        source, target = stage_of[edge.producer], stage_of[edge.consumer]
        layout = layouts[source]
        if source != target and layout.tp * layout.cp > 1 and layout.has_patches(graph.layer(edge.producer)):
            kinds = readers.setdefault((edge.producer, target), set())
            kinds.add(layout.has_patches(graph.layer(edge.consumer)))
            if len(kinds) > 1:
                raise InputError(
                    f"the plan cuts images along patches and stage {target} reads rows of {edge.producer} and also all "
                    "of them, which this release does not execute: cut the stages elsewhere, or rehearse the plan"
                )


def _of_cp(plan: Plan, what: str) -> str:
    return (
        f"the plan has cp={plan.cp}, and {what}, which this release executes with cp=1 only: set `constraints.cp: [1]` "
        "in the scenario and optimize again, or rehearse the plan"
    )


def _refuse_recomputation(plan: Plan, own_model: bool) -> None:
    for index, stage in enumerate(plan.stages):
        if own_model and stage.recompute == "selective" and plan.mesh(index).cp > 1:
            raise InputError(
                f"stage {index} has recompute=selective and cp={plan.mesh(index).cp}, and of models of the user's own "
                "this release recomputes attention alone where no rows of others are read: set "
                "`constraints.recompute: [none, full]` or `constraints.cp: [1]` in the scenario and optimize again, or "
                "rehearse the plan"
            )


def _refuse_split_backwards(plan: Plan) -> None:
    """No schedule of mmplan's own has them."""
    for index, stage in enumerate(plan.stages):
        if is_whole(plan, index) and any(re.search(rf"\b{index}I", order) for order in plan.orders):
            again = stage.recompute != "none"
            choice = f"recompute={stage.recompute}" if again else f"sharding={plan.sharding}"
            raise InputError(
                f"stage {index} has {choice} and split backwards, and this release executes one of both: `mmplan "
                "simulate PLAN --schedule 1f1b -o NEW` writes the plan with whole backwards, or rehearse the plan"
            )


def check_local_run(plan: Plan, local: int, *, rehearse: bool, own_model: bool) -> None:
    """Refuse a run on this machine that cannot work.

    Raises:
        InputError: another number of processes is needed, or the gradient buffers of a rehearsal exceed the memory.
    """
    expected = process_count(plan, rehearse=rehearse, own_model=own_model)
    if local != expected:
        raise InputError(f"{local} local processes, the plan needs {_product(plan, rehearse)} = {expected}")
    if rehearse and expected > plan.pp:
        graph = build_graph(plan.scenario)
        buffers = [stage_gradient_bytes(plan, graph, stage) for stage in range(len(plan.stages))]
        needed = sum(plan.mesh(stage).dp * size for stage, size in enumerate(buffers))
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > available:
            raise InputError(
                f"a rehearsal sums real gradient buffers: {format_bytes(needed)} over {expected} processes, "
                f"this machine has {format_bytes(available)}; set `constraints.dp: [1]` or rehearse on several hosts"
            )


def _product(plan: Plan, rehearse: bool) -> str:
    """`pp=2 x dp=1 x tp=2`; of several meshes their sum."""
    rows = Counter(mesh_of_row(plan, row) for row in range(plan.pp))
    parts = []
    for mesh, count in rows.items():
        of = f"{' and '.join(mesh.modules)}: " if mesh.modules else ""
        shards = "" if rehearse else f" x tp={mesh.tp}" + (f" x cp={mesh.cp}" if mesh.cp > 1 else "")
        parts.append(f"{of}pp={count} x dp={mesh.dp}{shards}")
    if not rehearse and plan.world > plan.rank_count:
        parts.append(f"{plan.world - plan.rank_count} idle")
    return " + ".join(f"({part})" for part in parts) if len(parts) > 1 else parts[0]
