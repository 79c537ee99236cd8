"""Scenario files of the models that `../shared/data/scenarios/models.yaml` lists: dimensions, data, machines, recipes.

What our scenarios cannot say is replaced by the nearest that they can, and the `note` of the row says by what.
"""

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

Values = dict[str, Any]

DEVICES = {
    "H100-SXM-80G": "h100-sxm",
    "A100-SXM-80G": "a100-sxm-80",
    "A100-SXM-40G": "a100-sxm-40",
    "H100-94G": "h100-nvl",
    "RTX3090-24G": "rtx-3090",
}
UNNAMED_DEVICE = "h100-sxm"
ENCODERS = {
    **dict.fromkeys(("vit", "vit_native_res", "vit_native_res_window", "vit_tiles"), "vision_encoder"),
    **dict.fromkeys(("audio_encoder", "audio_vit", "imu_encoder"), "audio_encoder"),
    "text_encoder": "text_encoder",
}
BLOCK_KEYS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "gated_mlp")
MLA_KEYS = ("q_lora", "kv_lora", "qk_nope", "qk_rope", "v_dim")
ALL_LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
SIZES = 8  # image sizes that stand for a distribution
LATENT_CHANNELS = 64  # FLUX.1 and Wan2.1 predict 16 latent channels of 2 x 2 patches


def scenario_of(entry: Values, clusters: Mapping[str, Values]) -> tuple[Values, str]:
    """The scenario of an entry as YAML values, and what stands for something else in it."""
    notes: list[str] = []
    modules, edges = _modules(entry, notes)
    values: Values = {
        "name": entry["id"],
        "source": f"models.yaml: {entry['title']}",
        "model": {"modules": modules, "edges": edges, "pad_vocabulary": 128},
        "train": {name: mode for name, spec in entry["modules"].items() if (mode := _training(spec)) != "full"},
        "data": _data(entry, modules, notes),
        "batch": {"global": entry["global_batch"]},
        "precision": entry["precision"],
        "cluster": _cluster(entry, clusters[entry["cluster"]], notes),
    }
    if recipe := _recipe(entry, notes):
        values["recipes"] = {"published": recipe}
    return values, "; ".join(notes)


def apart_of(values: Values, entry: Values, cluster: Values) -> Values:
    """The scenario of an entry whose published plan has modules on ranks of their own: on all nodes that it reaches,
    with that plan as its recipe, beside a search that may do so, too."""
    plan = entry["reference_plan"]
    hetero = dict(plan["hetero"])
    ranks = hetero.pop("gpus")
    row = hetero.pop("llm")
    own = {name: {key: one[key] for key in ("tp", "pp", "dp") if key in one} for name, one in hetero.items()}
    recipe = {"source": f"{plan['src']}, {ranks} GPUs", **{key: row[key] for key in ("tp", "pp", "dp")}, "modules": own}
    recipe |= {"sharding": "optimizer", "microbatch": plan["mbs"]}
    return values | {
        "name": f"{values['name']}-apart",
        "cluster": values["cluster"] | {"nodes": cluster["nodes"]},
        "constraints": {"modules": "any"},
        "recipes": {"published": recipe},
    }


def _training(spec: Values) -> str | Values:
    if adapter := spec.get("adapter"):
        return {"lora": {"rank": adapter["rank"], "targets": list(ALL_LINEARS)}}
    return "frozen" if spec["frozen"] else "full"


def _modules(entry: Values, notes: list[str]) -> tuple[Values, list[list[str]]]:
    modules: Values = {}
    edges: list[list[str]] = []
    given = entry["modules"]
    reader: dict[str, str] = dict(entry["edges"])
    target = "loss" if "loss" in reader.values() else next(n for n in given if given[n]["kind"] in _LANGUAGE)
    width = _loss_block(given, modules, notes) if target == "loss" else given[target]["hidden"]
    for name, spec in given.items():
        if spec["kind"] == "mlp":
            continue
        if spec["kind"] in _LANGUAGE:
            modules[name] = _language(spec, notes)
            continue
        modules[name] = _encoder(spec)
        projector = reader[name] if given.get(reader[name], {}).get("kind") == "mlp" else f"{name}_projector"
        dims = given[projector]["dims"] if projector in given else None
        modules[projector] = _projector(spec, width, dims)
        edges += [[name, projector], [projector, target]]
        edges += _deepstack(spec, name, projector, target, modules)
    edges += [[producer, consumer] for producer, consumer in entry["edges"] if given[producer]["kind"] in _LANGUAGE]
    return modules, edges


_LANGUAGE = ("decoder_llm", "dit", "dit_video")


def _loss_block(given: Values, modules: Values, notes: list[str]) -> int:
    """A language model of one small block behind two towers, which has to be there."""
    notes.append("one block of width 64 stands for the contrastive loss; its all-gather is not priced")
    modules["loss"] = {"kind": "language_model", "layers": 1, "hidden": 64, "heads": 1, "ffn": 64, "vocabulary": 128}
    return 64


def _encoder(spec: Values) -> Values:
    kind = ENCODERS[spec["kind"]]
    block = {"kind": kind, **{key: spec[key] for key in BLOCK_KEYS}}
    if spec.get("padded_heads_for_tp"):
        block["pad_heads"] = True
    if kind == "text_encoder":
        return block | {"vocabulary": spec["vocab"], "tokens": spec["tokens_per_item"], "causal": spec["causal"]}
    if kind == "audio_encoder":
        # 100 frames per second, two of them a token
        return block | {"mel_bins": spec.get("mel_bins", 128), "pad_s": spec["tokens_per_item"] / 50}
    block |= {"patch": spec["patch"], "temporal_patch": spec.get("temporal_patch", 1)}
    if "native" in spec["kind"]:
        if "window_px" in spec:
            block |= {
                "window_tokens": (spec["window_px"] // spec["patch"]) ** 2,
                "global_layers": spec["full_attn_blocks"],
            }
        return block
    tiles = 4 if spec["kind"] == "vit_tiles" else 1
    side = spec["image_size"] // spec["patch"]
    block |= {"image_size": side * spec["patch"], "tiles": tiles, "joint_tiles": tiles > 1}
    return block | {"class_token": spec["tokens_per_item"] > tiles * side**2, "keep_class_token": tiles > 1}


def _projector(spec: Values, width: int, dims: list[int] | None) -> Values:
    """The given one, or two linears behind as many merged tokens as the encoder hands on fewer."""
    tokens, kept = spec["tokens_per_item"], spec["tokens_to_llm_per_item"]
    if kept == 1:
        whole = ENCODERS[spec["kind"]] == "vision_encoder" and "image_size" in spec
        return {
            "kind": "projector",
            "dims": [spec["hidden"], width],
            "pool": (spec["image_size"] // spec["patch"]) ** 2 if whole else tokens,
        }
    merge = dims[0] // spec["hidden"] if dims is not None else round(tokens / kept)
    if ENCODERS[spec["kind"]] == "audio_encoder" and dims is None:
        return {"kind": "projector", "dims": [spec["hidden"], width], "pool": merge}
    inner = spec["hidden"] * merge
    return {"kind": "projector", "dims": dims or [inner, inner, width], "merge": merge}


def _deepstack(spec: Values, name: str, projector: str, target: str, modules: Values) -> list[list[str]]:
    """Projectors behind inner blocks, added behind the first language blocks (Qwen3-VL)."""
    edges = []
    for index, layer in enumerate(spec.get("deepstack_from_layers", [])):
        modules[f"deepstack{index}"] = dict(modules[projector])
        edges += [[f"{name}.{layer}", f"deepstack{index}"], [f"deepstack{index}", f"{target}.{index}"]]
    return edges


def _language(spec: Values, notes: list[str]) -> Values:
    keys = BLOCK_KEYS if spec.get("block") != "mla" else [k for k in BLOCK_KEYS if k not in ("kv_heads", "head_dim")]
    block: Values = {"kind": "language_model", **{key: spec[key] for key in keys}}
    block["vocabulary"] = spec.get("vocab", LATENT_CHANNELS)
    if "moe" in spec:
        block["moe"] = spec["moe"]
    match spec.get("block"):
        case "mla":
            block["mla"] = {key: spec[key] for key in MLA_KEYS}
        case "qwen3_5_hybrid":
            every = spec["full_attention_interval"]
            full = list(range(every - 1, spec["layers"], every))
            block |= {"window_tokens": spec["linear_head_dim"], "sliding": True, "global_layers": full}
            notes.append("linear attention as a sliding window of as many tokens as its state has rows")
        case "flux_double_single":
            notes.append(
                "blocks as language blocks: causal attention, one stream, no modulation (6.5 of 11.8 B weights)"
            )
        case "wan":
            block["ffn"] += spec["hidden"]
            notes.append(
                "blocks as language blocks: causal attention; queries and outputs of cross-attention as MLP width"
            )
    if crossing := spec.get("cross_attn_layers"):
        block["layers"] += crossing
        every = block["layers"] // crossing
        block["cross_layers"] = list(range(every - 2, block["layers"], every))
    return block


def _data(entry: Values, modules: Values, notes: list[str]) -> Values:
    """Sizes per sample; text fills the language model's sequence."""
    given, items = entry["modules"], entry["items_per_sample"]
    data: Values = {}
    merged = 0.0
    for name, spec in given.items():
        kind = ENCODERS.get(spec["kind"])
        if kind == "text_encoder":
            merged += spec["tokens_to_llm_per_item"]
        if kind not in ("vision_encoder", "audio_encoder"):
            continue
        counts, mean = _counts(items[name])
        if mean == 0:
            notes.append(f"{name} runs on every sample, of which it has few")
            merged += spec["tokens_to_llm_per_item"]
            continue
        if "cross_attn_layers" not in given.get("llm", {}):
            merged += mean * _mean_tokens(items[name], spec)
        key = "images" if kind == "vision_encoder" else "audio_clips"
        data[key] = counts
        if key == "audio_clips":
            data["audio_seconds"] = spec["tokens_per_item"] / 50
        elif "native" in spec["kind"]:
            data["image_size"] = _sizes(items[name], spec)
    data["text_tokens"] = max(1, round(entry["llm_seq_len"] - merged)) if "loss" not in modules else 1
    if "talker" in given:
        data["speech_tokens"] = 1024
        notes.append("1,024 speech tokens per sample are assumed")
    return data


def _counts(items: Any) -> tuple[Any, float]:
    """Items per sample as a scenario writes them, and their mean."""
    if not isinstance(items, dict):
        return items, float(items)
    match items["dist"]:
        case "bernoulli":
            return {"histogram": {0: 1 - items["p"], 1: items["p"]}}, items["p"]
        case "fixed":
            return items["n"], float(items["n"])
        case "anyres" | "tiles":
            least, most, mean = items["min"], items["max"], items["mean"]
            high = (mean - least) / (most - least) / 2  # half of the samples have the mean, the rest least or most
            return {"histogram": {least: 0.5 - high, mean: 0.5, most: high}}, float(mean)
    return 1, 1.0


def _mean_tokens(items: Any, spec: Values) -> float:
    if isinstance(items, dict):
        return float(items.get("mean_tokens") or items.get("tokens_each") or spec["tokens_to_llm_per_item"])
    return float(spec["tokens_to_llm_per_item"])


def _sizes(items: Any, spec: Values) -> list[int]:
    """Sides of square images: equal shares of a lognormal distribution with the given mean, or one size."""
    merge = round(spec["tokens_per_item"] / spec["tokens_to_llm_per_item"])
    unit = spec["patch"] * math.isqrt(merge)
    mean, sigma = _mean_tokens(items, spec), items.get("sigma", 0.0) if isinstance(items, dict) else 0.0
    shares = [NormalDist().inv_cdf((i + 0.5) / SIZES) for i in range(SIZES)] if sigma else [0.0]
    weights = [math.exp(sigma * z) for z in shares]
    return [unit * max(1, round(math.sqrt(mean * w * len(weights) / sum(weights)))) for w in weights]


def _cluster(entry: Values, cluster: Values, notes: list[str]) -> Values:
    if "pools" in cluster:
        keys = {"nodes": "nodes", "gpus_per_node": "devices_per_node"}
        pools = [{"device": DEVICES[p["gpu"]], **{ours: p[k] for k, ours in keys.items()}} for p in cluster["pools"]]
        return {"pools": pools, "network": "hdr-200"}
    if cluster["gpu"] not in DEVICES:
        notes.append(f"device is {UNNAMED_DEVICE}, models.yaml says '{cluster['gpu']}'")
    nodes = cluster["nodes"]
    if "active_ranks" in cluster:
        nodes = cluster["active_ranks"] // cluster["gpus_per_node"]
        notes.append(f"{nodes} nodes, as the recipe with vision beside the language model has")
    device = DEVICES.get(cluster["gpu"], UNNAMED_DEVICE)
    return {"device": device, "nodes": nodes, "devices_per_node": cluster["gpus_per_node"]}


def _recipe(entry: Values, notes: list[str]) -> Values:
    """The published plan; of software without degrees its ZeRO stage."""
    if plan := entry.get("reference_plan"):
        flat = {**plan, **plan.get("baseline", {})}
        if "hetero" in plan:
            notes.append("the recipe is the published baseline; see the row that ends in -apart for the other")
        found = {key: flat[key] for key in ("tp", "pp", "dp", "cp", "ep", "vp") if key in flat}
        if "Megatron" in plan["src"]:
            found["sharding"] = "optimizer"  # Megatron's distributed optimizer
        return {"source": plan["src"], **found, **({"microbatch": flat["mbs"]} if "mbs" in flat else {})}
    strategy = entry.get("measured", {}).get("strategy", "")
    zero = {"DeepSpeed ZeRO-2": "gradients", "DeepSpeed ZeRO-3": "parameters"}.get(strategy)
    return {"source": f"{entry['measured']['src']}: {strategy}", "sharding": zero} if zero else {}
