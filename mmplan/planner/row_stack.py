"""The software and hardware behind a row: its stack, technique, device and links, from what the source says."""

import re
from dataclasses import replace

from mmplan.planner.measured import MeasuredRow
from mmplan.scenario.catalogue import CatalogueDevice, catalogue_device, catalogue_link, device_names
from mmplan.scenario.cluster import Link
from mmplan.scenario.scenario import Dtype
from mmplan.scenario.stacks import stack_names, technique_of
from mmplan.scenario.technique import ATTENTION_KINDS, Attention, Fp8, Recompute, Sharding, Technique

# First match wins; all of it is looked for in source, framework, note and attention.
_STACK_WORDS = (
    (r"maxtext|paxml|\bjax\b|t5x|praxis", "jax-2025"),
    (r"foundry|mosaic|\bcomposer\b|\bmpt\b", "llm-foundry-2023"),
    (r"bloom|bigscience|mt-nlg", "megatron-deepspeed-2022"),
    (r"vtrain|megatron-deepspeed", "megatron-deepspeed-2024"),
    (r"nemo 25|25\.\d\d|gb200|gb300|\bb200|\bb300", "nemo-2025"),
    (r"nemo|megatron[- ]core|mcore|dgx cloud|mlperf|megatron bridge", "nemo-2024"),
    (r"torchtitan|torchtune|picotron|nanotron|litgpt|hugging|llava|axolotl|fsdp2", "torch-2025"),
    (r"colossal|nnscaler|veomni", "torch-2025"),
    (r"megascale", "nemo-2024"),
    (r"opt-175|metaseq|gpt-neox|palm", "megatron-2021"),
    (r"deepspeed", "deepspeed-2024"),
    (r"megatron|zero bubble|vocabulary parallelism|korthikanti|alpa|oneflow|selene|galvatron|aceso", "megatron-2021"),
    (r"flash-?attn|flashattention", "llm-foundry-2023"),
)
_DEVICE_WORDS = (
    (r"gb300", "gb300"),
    (r"gb200", "gb200"),
    (r"\bb[123]00", "b200"),
    (r"gh200", "gh200"),
    (r"h200", "h200"),
    (r"h100.*(nvl)", "h100-nvl"),
    (r"h100.*(pcie|pci-e)", "h100-pcie"),
    (r"h100", "h100-sxm"),
    (r"h800", "h800-sxm"),
    (r"\bh20\b", "h20"),
    (r"a800", "a800-sxm-80"),
    (r"a100.*pcie.*40|a100.*40.*pcie", "a100-pcie-40"),
    (r"a100.*pcie", "a100-pcie-80"),
    (r"a100.*40", "a100-sxm-40"),
    (r"a100", "a100-sxm-80"),
    (r"v100.*16", "v100-sxm2-16"),
    (r"v100", "v100-sxm2-32"),
    (r"mi325", "mi325x"),
    (r"mi300", "mi300x"),
    (r"mi250", "mi250x"),
    (r"l40s", "l40s"),
    (r"4090", "rtx-4090"),
    (r"3090", "rtx-3090"),
    (r"\ba40\b", "a40"),
    (r"\ba10g?\b", "a10"),
)
NVLINK_DOMAIN = {"gb200": 72, "gb300": 72}  # NVL72: 18 trays of 4 in one NVLink domain (NVIDIA GB200 NVL72 data sheet)


def row_stack(row: MeasuredRow) -> str:
    """The software stack of a row: its `stack` column, or what its source and notes name, or the GPU's time."""
    if row.text("stack") in stack_names():
        return row.text("stack")
    for column in ("source", "framework", "note", "model"):
        said = row.text(column)
        if "dgx cloud" in said:
            said = f"{row.text('framework')} {row.text('model')} {said}"
        if re.search(r"nemo|megatron[- ]core|dgx cloud", said) and re.search(r"\bg?b[23]00", row.text("gpu")):
            said = f"nemo 25 {said}"
        for pattern, stack in _STACK_WORDS:
            if re.search(pattern, said):
                return "megatron-2019" if stack == "megatron-2021" and "v100" in row.text("gpu") else stack
    if "v100" in row.text("gpu"):
        return "megatron-2019"
    return "megatron-2021" if re.search(r"a100|a40|3090", row.text("gpu")) else "torch-2025"


def row_device(row: MeasuredRow) -> CatalogueDevice | None:
    """The catalogue's device, None when its name is unknown."""
    if row.text("gpu") in device_names():
        return catalogue_device(row.text("gpu"))
    name = device_in(f"{row.text('gpu')} {row.texts.get('memory_gb', '')}")
    return None if name is None else catalogue_device(name)


def device_in(text: str) -> str | None:
    """The catalogue's name of the first kind of GPU that a text speaks of, such as 'NVIDIA A100-SXM4-80GB'."""
    said = text.lower().replace("-", " ").replace("_", " ")
    return next((name for pattern, name in _DEVICE_WORDS if re.search(pattern, said)), None)


def row_network(row: MeasuredRow, entry: CatalogueDevice, per_node: int) -> Link:
    """The network: a device's share of the node's ports that the row names, else one port per device."""
    default, said = catalogue_link(entry.network), row.text("network")
    per_node_gbps = None
    ports = re.search(r"(\d+)\s*x\s*(\d+)\s*gb", said) or re.search(r"(\d+)\s+\w+\s+infiniband\s+\((\d+)\s*gb", said)
    if "omni-path" in said or "opa" in said:
        links = re.search(r"(\d+)\s*(?:x\s*)?omni-path", said)
        per_node_gbps = 100.0 * int(links[1]) if links else 100.0
    elif ports:
        per_node_gbps = float(ports[1]) * float(ports[2])
    else:
        total = re.search(r"(\d+(?:\.\d+)?)\s*\(?\s*(gb/s|gbps|gbit)", said)
        if total and re.search(r"node|infiniband|roce|ethernet|ib\b", said):
            per_node_gbps = float(total[1])
    if per_node_gbps is None:
        return default
    return replace(default, bytes_per_s=per_node_gbps * 1e9 / 8 / per_node, source=f"the row: {row.text('network')}")


def row_technique(row: MeasuredRow) -> Technique:
    """The stack's defaults, replaced by what the row says."""
    stack = row_stack(row)
    defaults = technique_of(stack)
    tp = row.count("tp", 1) or 1
    said = row.text("sequence_parallel")
    parallel = row.numbers.get("sequence_parallel")
    sequence_parallel = defaults.sequence_parallel and tp > 1
    if parallel is not None or said:
        on = bool(parallel) if parallel is not None else said in ("true", "yes", "on")
        sequence_parallel = on and tp > 1
    recompute, layers = _recompute(row, defaults)
    return replace(
        defaults,
        attention=_attention(row, defaults),
        fp8=_fp8(row),
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        recompute_layers=layers,
        sharding=_sharding(row, defaults),
        gradient_dtype=_gradient_dtype(row, defaults),
        dropout=defaults.dropout and row.text("attention") != "flash",
        cross_entropy="fused" if "fused cross" in row.text("note") else defaults.cross_entropy,
    )


def _attention(row: MeasuredRow, defaults: Technique) -> Attention:
    said = row.text("attention") + " " + row.text("note")
    for kind in ATTENTION_KINDS:
        if row.text("attention") == kind:
            return kind
    if re.search(r"no flash|without flash|fused softmax|unfused", said):
        return "math"
    if re.search(r"flash ?attention[- ]?3|\bfa3\b|flash3", said):
        return "flash3"
    if re.search(r"flash ?attention[- ]?2|\bfa2\b|flash2|sdpa", said):
        return "flash2"
    if "cudnn" in said:
        return "cudnn"
    if "flash" in row.text("attention") and defaults.attention == "math":
        return "flash1"
    return defaults.attention


def _fp8(row: MeasuredRow) -> Fp8:
    said = row.text("precision")
    if "mxfp8" in said:
        return "mx"
    if "fp8" not in said and "float8" not in said:
        return "none"
    return "block" if "block" in said else "tensor"


def _recompute(row: MeasuredRow, defaults: Technique) -> tuple[Recompute, int | None]:
    said = row.text("recompute")
    if "recompute" in row.numbers:
        said = "full" if row.numbers["recompute"] else "none"
    layers = re.search(r"(\d+)\s*layers?", said)
    if layers:
        return "full", int(layers[1])
    if re.search(r"selective", said):
        return "selective", None
    if re.search(r"full|true|yes|\bon\b|uniform|checkpoint", said):
        return "full", None
    if re.search(r"none|no\b|off|false", said):
        return "none", None
    return defaults.recompute, defaults.recompute_layers


def _sharding(row: MeasuredRow, defaults: Technique) -> Sharding:
    said = row.text("sharding")
    if "sharding" in row.numbers:
        said = f"zero-{round(row.numbers['sharding'])}"
    if re.search(r"no fsdp|optimizer|zero-?\s?1|stage 1", said):
        return "optimizer"
    if re.search(r"shard_grad|gradients|zero-?\s?2|stage 2", said):
        return "gradients"
    if re.search(r"fsdp|parameters|full_shard|zero-?\s?3|stage 3", said):
        return "parameters"
    if re.search(r"zero-?\s?0|ddp|none", said):
        return "none"
    return defaults.sharding


def _gradient_dtype(row: MeasuredRow, defaults: Technique) -> Dtype | None:
    """Composer's mixed precision DEFAULT reduces in fp32, PURE in 16 bit (composer/trainer/mosaic_fsdp_utils.py)."""
    if row.text("gradient_dtype"):
        return "fp32" if row.text("gradient_dtype") == "fp32" else "bf16"
    if "mode default" in row.text("note"):
        return "fp32"
    return defaults.gradient_dtype
