"""From a row of a table to a scenario and degrees that can be priced, or the reason why not."""

import math
import re
from dataclasses import dataclass, replace

from mmplan.planner.degrees import Degrees, ScheduleKind
from mmplan.planner.measured import MeasuredRow
from mmplan.planner.row_stack import NVLINK_DOMAIN, row_device, row_network, row_stack, row_technique
from mmplan.scenario.catalogue import catalogue_link
from mmplan.scenario.cluster import Cluster, Pool
from mmplan.scenario.scenario import (
    Constraints,
    Data,
    Distribution,
    Dtype,
    Model,
    ModelModule,
    Moe,
    Optimizer,
    Scenario,
    Training,
    Transformer,
    Vocabulary,
)

GPT2_VOCABULARY = 51_200  # 50,257 padded by Megatron-LM to a multiple of 128 x tp = 8 (arXiv 1909.08053, section 3)
VOCABULARY_UNIT = 128  # Megatron-LM's --make-vocab-size-divisible-by, times tp
LORA_RANK = 32  # NeMo 2.0 `LoRA(dim=32)`, its default, on query, key, value
PACKED_TOKENS = 256  # NeMo's fine-tuning recipes pack SQuAD samples (about 200 tokens with the question) to the length
_NONE, _ZERO = (1.0,), (0.0,)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowJob:
    """What a row measured, as mmplan's types; `assumed` says what the row leaves open and how it was read."""

    row: MeasuredRow
    scenario: Scenario
    degrees: Degrees
    step_s: float
    assumed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unpriced:
    """A row that cannot be priced, with the reason."""

    row: MeasuredRow
    reason: str


def row_job(row: MeasuredRow) -> RowJob | Unpriced:
    """The job of a row."""
    if row.fault:
        return Unpriced(row, row.fault)
    step_s = row.step_s()
    if step_s is None:
        return Unpriced(row, "no step time and no throughput with batch and sequence length")
    for column in ("layers", "hidden", "sequence", "gpus", "gpu", "global_batch"):
        if column not in row.numbers and column not in row.texts:
            return Unpriced(row, f"no {column.replace('_', ' ')}")
        if column in row.texts and column != "gpu":
            return Unpriced(row, f"{column.replace('_', ' ')} '{row.texts[column]}' is no number")
    if row.texts.get("encoder"):
        return Unpriced(row, f"has an encoder ({row.texts['encoder']}) whose sizes per sample are not in the table")
    if row_device(row) is None:
        return Unpriced(row, f"unknown GPU '{row.texts.get('gpu', row.numbers.get('gpu'))}'")
    assumed: list[str] = []
    degrees = _degrees(row, assumed)
    if isinstance(degrees, str):
        return Unpriced(row, degrees)
    model = _model(row, assumed)
    if isinstance(model, str):
        return Unpriced(row, model)
    technique = row_technique(row)
    for column, value in (("recompute", technique.recompute), ("attention", technique.attention)):
        if not row.text(column):
            assumed.append(f"{column} = {value} (default of {technique.stack})")
    cluster = _cluster(row)
    device = cluster.pools[0].device
    if technique.fp8 != "none" and device.fp8_flops_per_s is None:
        return Unpriced(row, f"FP8 on {device.name}, which has no FP8 units")
    sequence = float(row.numbers["sequence"])
    if row.text("task") in ("sft", "lora") and re.search("summary|dgx cloud", row.text("source")):
        packed = max(1, round(sequence / PACKED_TOKENS))
        sequence /= packed
        degrees = replace(degrees, microbatch_size=degrees.microbatch_size * packed)
        assumed.append(f"sequences packed from {packed} samples of {PACKED_TOKENS} tokens")
    fixed = Distribution(values=(sequence,), weights=_NONE)
    nothing = Distribution(values=_ZERO, weights=_NONE)
    data = Data(
        text_tokens=fixed, images=nothing, image_sizes=(), audio_clips=nothing, audio_s=nothing, speech_tokens=nothing
    )
    scenario = Scenario(
        name=f"row-{row.id}",
        model=model,
        data=data,
        global_batch=degrees.global_batch,
        precision=_precision(row, device.bf16_flops_per_s is None),
        optimizer=Optimizer(),
        cluster=cluster,
        constraints=Constraints(),
        source=row.source,
        technique=technique,
    )
    return RowJob(row=row, scenario=scenario, degrees=degrees, step_s=step_s, assumed=tuple(assumed))


def _precision(row: MeasuredRow, without_bf16: bool) -> Dtype:
    said = row.text("precision")
    if without_bf16 or ("fp16" in said and "bf16" not in said):
        return "fp16"
    return "fp32" if said in ("fp32", "float32") else "bf16"


def _cluster(row: MeasuredRow) -> Cluster:
    entry = row_device(row)
    assert entry is not None
    gpus, per_node = row.count("gpus", 1) or 1, row.count("gpus_per_node", 8) or 8
    domain = min(gpus, max(per_node, NVLINK_DOMAIN.get(entry.device.name, 0)))
    while gpus % domain:
        domain -= 1
    network = row_network(row, entry, per_node)
    pool = Pool(
        device=entry.device,
        nodes=gpus // domain,
        devices_per_node=domain,
        node_link=catalogue_link(entry.node_link),
    )
    return Cluster(name=f"row-{row.id}", pools=(pool,), network_link=network)


def _degrees(row: MeasuredRow, assumed: list[str]) -> Degrees | str:
    gpus = row.count("gpus", 1) or 1
    tp, pp, cp = (row.count(name, 1) or 1 for name in ("tp", "pp", "cp"))
    if gpus % (tp * pp * cp):
        return f"tp {tp} x pp {pp} x cp {cp} does not divide {gpus} GPUs"
    dp = gpus // (tp * pp * cp)
    batch = row.count("global_batch") or 0
    size = row.count("microbatch") or None  # a zero says as little as a blank
    if size is None and row.count("grad_accum") and row.count("grad_accum") != 1:
        size = max(1, round(batch / dp / (row.count("grad_accum") or 1)))
    if size is None:
        size = 1
        assumed.append("microbatch = 1 (not given)")
    if batch < dp * size:
        return f"global batch {batch} is less than dp {dp} x microbatch {size}"
    microbatches = round(batch / (dp * size))
    if microbatches * dp * size != batch:
        assumed.append(f"{microbatches} microbatches: global batch {batch} is not a multiple of dp {dp} x {size}")
    schedule, vp = _schedule(row, pp, assumed)
    layers = row.count("layers", 1) or 1
    if layers + 2 < pp * vp:
        return f"{layers} layers in {pp} stages x {vp} chunks"
    ep = row.count("ep", 1) or 1
    return Degrees(
        tp=tp,
        cp=cp,
        pp=pp,
        vp=vp,
        dp=dp,
        ep=ep if row.count("experts") else 1,
        etp=row.count("etp", tp) or 1,  # before parallel folding (arXiv 2504.14960) experts share the tp degree
        microbatch_size=size,
        microbatches=microbatches,
        schedule=schedule,
    )


def _schedule(row: MeasuredRow, pp: int, assumed: list[str]) -> tuple[ScheduleKind, int]:
    said, vp_said = row.text("schedule"), row.text("vp")
    found = re.search(r"\d+", vp_said)
    layers = row.count("layers", 1) or 1
    one_layer = max(1, math.ceil((layers if layers % pp == 0 else layers + 2) / pp))
    vp = int(float(found[0])) if found and "max" not in vp_said else one_layer if "max" in vp_said else 0
    if pp == 1:
        return "1f1b", 1
    if "zb-2p" in said or "zb-h2" in said or "zb2p" in said:
        return "zb-2p", 1
    if "zb-v" in said or "zbv" in said:
        return "zb-v", 1
    if "zb" in said or "zero bubble" in said:
        return "zb-1p", 1
    if "gpipe" in said:
        return "gpipe", 1
    if vp == 0 and row_stack(row).startswith("nemo") and layers + 2 >= pp * one_layer:
        assumed.append(f"vp = {one_layer}: one layer per chunk (VP=1 misses these rows by 34 %)")
        vp = one_layer
    if vp > 1:
        return "interleaved", vp
    if "1f1b-i" in said or "interleaved" in said:
        return "interleaved", one_layer
    return "1f1b", 1


def _model(row: MeasuredRow, assumed: list[str]) -> Model | str:
    numbers = row.numbers
    hidden = round(numbers["hidden"])
    head_dim = row.count("head_dim")
    heads = row.count("heads") or (hidden // head_dim if head_dim else 0)
    if not heads:
        heads = max(1, hidden // 64)
        assumed.append(f"heads = {heads} (of 64, not given)")
    head_dim = head_dim or hidden // heads
    gated = bool(numbers.get("gated", 0))
    ffn = row.count("ffn") or row.count("expert_ffn") or 4 * hidden
    vocabulary = _vocabulary(row, assumed)
    if re.match("megatron|nemo", row_stack(row)):
        unit = VOCABULARY_UNIT * (row.count("tp", 1) or 1)
        vocabulary = -(-vocabulary // unit) * unit
    experts, topk = row.count("experts"), row.count("topk")
    moe = None
    if experts and experts > 1:
        if not topk:
            return "no topk of the experts"
        moe = Moe(experts=experts, topk=topk, expert_ffn=row.count("expert_ffn") or ffn)
    shape = Transformer(
        layers=round(numbers["layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=row.count("kv_heads") or heads,
        head_dim=head_dim,
        ffn=ffn,
        gated_mlp=gated,
        causal=True,
        norm="rms" if gated else "layer",
        moe=moe,
    )
    lora = "lora" in row.text("task")
    if lora:
        assumed.append(f"LoRA rank {LORA_RANK} on q, k, v")
    training = Training(mode="lora", rank=LORA_RANK, targets=("q", "k", "v")) if lora else Training()
    module = ModelModule(
        name="llm",
        kind="language_model",
        modality="text",
        transformer=shape,
        vocabulary=Vocabulary(size=vocabulary),
        training=training,
    )
    return Model(name="model", modules=(module,), edges=())


def _vocabulary(row: MeasuredRow, assumed: list[str]) -> int:
    said = re.search(r"(\d+(?:\.\d+)?)\s*(k?)", row.text("vocabulary").replace(",", ""))
    if said is None:
        assumed.append(f"vocabulary = {GPT2_VOCABULARY:,} (not given)")
        return GPT2_VOCABULARY
    return round(float(said[1]) * (1000 if said[2] else 1))
