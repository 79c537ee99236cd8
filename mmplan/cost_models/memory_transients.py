"""Device memory that comes and goes around sharded state: gathered parameters, buckets, the optimizer update."""

from collections.abc import Sequence

from mmplan.cost_models.memory_estimate import MemoryPart
from mmplan.cost_models.memory_rules import MemoryRules, memory_rules, parameter_bytes
from mmplan.cost_models.memory_states import ParameterCounts, Replicas, split_bytes
from mmplan.scenario.scenario import DTYPE_BYTES, Dtype, Optimizer
from mmplan.scenario.technique import SHARDINGS, Technique


def gathered_part(
    units: Sequence[ParameterCounts], root: ParameterCounts, hidden: int, precision: Dtype, technique: Technique
) -> MemoryPart | None:
    """Whole parameters and gradients that are live although they are sharded, and gradient buckets.

    Args:
        units: what is gathered as one: transformer blocks.
        root: the rest (embedding, head), which FSDP gathers for the whole step.
        hidden: width of the language model, from which "auto" buckets follow.
    """
    rules, width = memory_rules(technique.stack), DTYPE_BYTES[precision]
    stage = SHARDINGS.index(technique.sharding)
    if rules.engine == "fsdp":
        size, why = _fsdp(units, root, width, stage)
    elif rules.engine == "deepspeed":
        size, why = _deepspeed(units, root, hidden, stage, rules, technique)
    elif stage == 3:
        size, why = _two_units(units, root)
    else:
        size, why = 0, ""
    size *= width
    return MemoryPart(name="gathered parameters", bytes=size, why=f"({why}) x {width} B") if size > 0 else None


def _fsdp(units: Sequence[ParameterCounts], root: ParameterCounts, width: int, stage: int) -> tuple[int, str]:
    """Parameters in the computing type, gathered from fp32 shards (torch FSDP docs, `ShardingStrategy`)."""
    total = sum(unit.total for unit in units) + root.total
    gradient = max((unit.trained for unit in units), default=0)
    if stage < 2:
        return (total if width < 4 else 0), f"cast of all {total:,} weights"
    if stage == 2:
        return total + gradient, f"all weights {total:,} + gradient of one unit {gradient:,}"
    return _two_units(units, root)


def _two_units(units: Sequence[ParameterCounts], root: ParameterCounts) -> tuple[int, str]:
    """The unit at work, the prefetched one (torch FSDP docs, `BackwardPrefetch`), the root and one gradient."""
    largest = max((unit.total for unit in units), default=0)
    gradient = max([unit.trained for unit in units] + [root.trained])
    live = min(sum(unit.total for unit in units), 2 * largest) + root.total
    return live + gradient, f"2 units of {largest:,} + the rest {root.total:,} + one gradient {gradient:,}"


def _deepspeed(
    units: Sequence[ParameterCounts],
    root: ParameterCounts,
    hidden: int,
    stage: int,
    rules: MemoryRules,
    technique: Technique,
) -> tuple[int, str]:
    """Gradient buckets, two with overlap; ZeRO-3: parameters stay gathered up to `stage3_max_live_parameters` whatever
    the number of ranks, never less than the largest layer (all experts of it where they are one tensor)."""
    if stage == 0:
        return 0, ""
    trained = sum(unit.trained for unit in units) + root.trained
    bucket = min(hidden**2 if rules.bucket_elements is None else rules.bucket_elements, trained)
    buckets = bucket * (2 if technique.overlap_dp else 1)
    if stage < 3:
        return buckets, f"gradient buckets {buckets:,}"
    total = sum(unit.total for unit in units) + root.total
    live = min(total, max([rules.live_elements, root.total] + [unit.total for unit in units]))
    gradient = max([unit.trained for unit in units] + [root.trained])
    return (
        buckets + live + gradient,
        f"gradient buckets {buckets:,} + live parameters {live:,} + gradient of one layer {gradient:,}",
    )


def optimizer_step_part(
    counts: ParameterCounts, replicas: Replicas, precision: Dtype, optimizer: Optimizer, technique: Technique
) -> MemoryPart | None:
    """Temporary bytes of the update; it happens when no activations are alive.

    fsdp and mmplan: torch's default `foreach` AdamW makes intermediates as large as the parameters (torch.optim.AdamW
    docs, "foreach"). megatron and deepspeed: fp32 copies of 16-bit gradients of the shard (distrib_optimizer.py,
    `shard_main_param.grad`; stage_1_and_2.py, `single_grad_partition`).
    """
    rules, per = memory_rules(technique.stack), parameter_bytes(precision, optimizer, technique)
    if technique.host_states != "none" or counts.trained == 0 or optimizer.name == "sgd":
        return None
    size = split_bytes(counts, replicas, 4, technique.sharding != "none")
    if rules.engine in ("fsdp", "plain"):
        return MemoryPart(name="foreach temporaries", bytes=size, why=f"{size // 4:,} x 4 B")
    if per.gradient < 4:
        return MemoryPart(name="fp32 gradients", bytes=size, why=f"{size // 4:,} of the shard x 4 B")
    return None
