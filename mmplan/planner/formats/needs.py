"""What a plan needs of the framework that runs it: every part that not all have, with the plan's own numbers.

`support.yaml` says for each need which framework has it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mmplan.cost_models.graph import ComputationGraph
from mmplan.planner.formats.sequence_length import sample_lengths
from mmplan.planner.formats.stage_needs import stage_needs
from mmplan.planner.formats.torchrun_head import processes_per_node
from mmplan.planner.plan import Plan
from mmplan.planner.stage_graph import build_stage_graph
from mmplan.scenario.precisions import unlike_precisions
from mmplan.scenario.scenario import ModelModule


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """`name`: a row of `support.yaml`; `sentence`: what of the plan it is."""

    name: str
    sentence: str


def plan_needs(plan: Plan, graph: ComputationGraph) -> tuple[Need, ...]:
    """All needs, in the order of a reader's interest.

    Raises:
        CheckError: the plan's stages are not sound.
    """
    stages = build_stage_graph([stage.layers for stage in plan.stages], graph)
    found = [*_degrees(plan), *stage_needs(plan, graph, stages), *_sharding(plan), *_training(plan)]
    return tuple(Need(name=name, sentence=sentence) for name, sentence in (*found, *_rest(plan)))


Found = Iterator[tuple[str, str]]


def _degrees(plan: Plan) -> Found:
    if plan.dp > 1:
        yield "replicas", f"dp={plan.dp}"
    if plan.tp > 1:
        yield "tensor parallelism", f"tp={plan.tp}"
        if plan.tp & (plan.tp - 1):
            yield "odd tensor parallelism", f"tp={plan.tp} is no power of 2"
        for module in _padded(plan):
            yield "padded heads", f"heads of {module.name} are filled up to a multiple of tp={plan.tp}"
    if plan.cp > 1:
        way = plan.scenario.technique.context_parallel
        yield f"context parallelism by {way}", f"cp={plan.cp}, {way}"
    if plan.ep > 1:
        yield "expert parallelism", f"ep={plan.ep}"
        if plan.etp > 1:
            yield "tensor parallel experts", f"etp={plan.etp}"
    if plan.spread and plan.width > 1:
        if by_samples := [name for name in plan.spread if name not in plan.patches]:
            names = " and ".join(by_samples)
            yield "spread modules", f"{names} whole on each of {plan.width} ranks, which take samples in turn"
        if plan.patches:
            names = " and ".join(plan.patches)
            yield "patch groups", f"{names} whole on each of {plan.width} ranks, which take rows of every image"
    if plan.batch_factor > 1:
        yield "several microbatches at once", f"{' and '.join(plan.together)} on {plan.batch_factor} at once"
    if plan.prefetch:
        yield "frozen encoders a step ahead", f"{' and '.join(plan.prefetch)} on the next step's microbatches"
    for mesh in plan.meshes:
        yield "modules on meshes of their own", f"{' and '.join(mesh.modules)} on {mesh}"
        if mesh.patches:
            yield "patch groups", f"{' and '.join(mesh.patches)} whole on each of {mesh.cp} ranks of their own"
    cluster = plan.scenario.cluster
    pools = cluster.pools_of(0, plan.world - 1)
    kinds = dict.fromkeys(f"{cluster.pools[p].devices_per_node} x {cluster.pools[p].device.name}" for p in pools)
    if len(kinds) > 1:
        yield "unlike pools", "nodes of " + " and of ".join(kinds)
    counts = processes_per_node(plan)
    if len(counts) > 1:
        yield "unequal nodes", " then ".join(f"{nodes} x {count}" for nodes, count in counts[:4]) + " processes"


def _padded(plan: Plan) -> list[ModelModule]:
    modules = plan.scenario.model.modules
    shapes = [(module, module.transformer) for module in modules if module.name not in plan.spread]
    return [m for m, s in shapes if s is not None and s.mla is None and (s.heads % plan.tp or s.kv_heads % plan.tp)]


def _sharding(plan: Plan) -> Found:
    """ZeRO stages, and what of them and of cp a pipeline makes hard."""
    if plan.cp > 1 and plan.pp > 1:
        yield "context parallelism in a pipeline", f"cp={plan.cp}, pp={plan.pp}"
    if plan.cp > 1 and plan.tp > 1:
        yield "context beside tensor parallelism", f"cp={plan.cp}, tp={plan.tp}"
    shared = plan.dp * plan.cp
    if shared == 1:
        return
    stage = {"none": 0, "optimizer": 1, "gradients": 2, "parameters": 3}[plan.sharding]
    if stage == 0:
        if plan.width > 1:
            yield "replicas that shard nothing, beside tp or cp", f"dp={plan.dp} beside tp={plan.tp}, cp={plan.cp}"
        return
    yield f"ZeRO-{stage}", f"{plan.sharding} sharded over {shared} ranks"
    if stage > 1 and plan.pp > 1:
        yield f"ZeRO-{stage} in a pipeline", f"{plan.sharding} sharded, pp={plan.pp}"
    if stage > 1 and plan.ep > 1:
        yield f"ZeRO-{stage} with expert parallelism", f"{plan.sharding} sharded, ep={plan.ep}"


def _training(plan: Plan) -> Found:
    modules = plan.scenario.model.modules
    for mode, name in (("frozen", "frozen modules"), ("lora", "adapters")):
        those = [module.name for module in modules if module.training.mode == mode]
        if those:
            yield name, " and ".join(those)
    levels = dict.fromkeys(stage.recompute for stage in plan.stages)
    if len(levels) > 1:
        yield "recomputation by stage", ", ".join(levels)
    if "selective" in levels:
        yield "recomputation of attention", "selective"
    parts = [level for level in levels if level not in ("none", "selective", "full")]
    if parts:
        yield "recomputation of some blocks", f"{' and '.join(parts)} of a stage's blocks"
    if "full" in levels:
        yield "recomputation of all blocks", "full"


def _rest(plan: Plan) -> Found:
    scenario = plan.scenario
    if plan.composition != "in order":
        yield "microbatches composed by size", plan.composition
    if scenario.constraints.no_split and plan.pp > 1:
        yield "no-split zones", f"no cut next to {len(scenario.constraints.no_split)} layers"
    precision = {word for zone in scenario.constraints.zones for word in zone.forbid} & {"fp8", "low_precision_reduce"}
    if precision:
        yield "zones without low precision", " and ".join(sorted(precision))
    if scenario.technique.host_activations:
        inputs = all(stage.recompute == "full" for stage in plan.stages)
        what = "inputs of recomputed blocks" if inputs else "activations"
        yield f"{what} in host memory", f"offload {scenario.technique.offload}"
    if scenario.technique.host_states != "none":
        whole = scenario.technique.host_states == "parameters"
        name = "weights in host memory" if whole else "optimizer state in host memory"
        yield name, f"offload {scenario.technique.offload}"
    if scenario.technique.compression != "none":
        yield "compressed gradients", f"compression {scenario.technique.compression}"
    if unlike := unlike_precisions(scenario):
        yield "a precision per module", unlike
    if scenario.technique.fp8 != "none":
        yield "FP8", f"fp8 {scenario.technique.fp8}"
    if scenario.technique.sequence_parallel and plan.tp > 1:
        yield "sequence parallelism", "norms and residuals split over tp"
    heard = [module.name for module in scenario.model.modules if module.kind == "audio_encoder"]
    if heard:
        yield "audio encoders", " and ".join(heard)
    crossed = [f"{edge.producer} to {edge.consumer}" for edge in scenario.model.edges if edge.kind == "cross_attention"]
    if crossed:
        yield "cross-attention between modules", " and ".join(crossed)
    languages = [module for module in scenario.model.modules if module.kind == "language_model"]
    if not languages:
        yield "no language model", scenario.model.name
    if len(languages) > 1:
        yield "several language models", " and ".join(module.name for module in languages)
    for module in languages:
        lengths = sample_lengths(plan, module)
        if min(lengths) < max(lengths):
            told = f"{min(lengths):,} to {max(lengths):,} tokens in {module.name}"
            yield "samples of unlike length", told
            if plan.pp > 1:
                yield "samples of unlike length between stages", told
            break
