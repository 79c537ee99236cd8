"""What Megatron's arguments say of the model and of what is trained; defaults of megatron/training/arguments.py."""

import re

from mmplan.scenario.formats.launch.facts import Fact, is_unresolved, whole
from mmplan.scenario.formats.launch.taken import Taken, like

# Tokens of tokenizers: vocab_size of the models' config.json; GPT-2: arXiv 1909.08053, section 3.
_VOCABULARIES = (
    (r"gpt2|gpt-2", 50257),
    (r"llama-?_?3", 128256),
    (r"qwen.*(7|14|32|72)b", 152064),
    (r"qwen", 151936),
    (r"mixtral|mistral|llama", 32000),
    (r"deepseek.?v[23]", 129280),
)


def model_facts(taken: Taken, facts: dict[str, Fact], warnings: list[str]) -> None:
    """Shapes that switches decide, with Megatron's defaults, where the arguments describe a model at all."""
    _known_name(taken, facts, warnings)
    if "layers" not in facts or "hidden" not in facts:
        return
    base = facts["hidden"]
    gated = bool(taken.on("swiglu", "gated_linear_unit", "use_fused_swiglu"))
    facts["gated"] = like(base, gated)
    if taken.on("squared_relu"):
        warnings.append("--squared-relu is priced as GELU, which moves as many bytes")
    norm = taken.text("normalization").lower()
    facts["norm"] = like(base, "rms" if "rms" in norm or (taken.on("use_fused_rmsnorm") and not norm) else "layer")
    biased = not taken.on("disable_bias_linear") and taken.on("add_bias_linear") is not False
    facts["bias"] = like(base, biased)
    facts["qkv_bias"] = like(base, biased or bool(taken.on("add_qkv_bias")))
    facts["qk_norm"] = like(base, bool(taken.on("qk_layernorm", "qk_norm")))
    untied = taken.on("untie_embeddings_and_output_weights")
    facts["tied"] = like(base, not untied)
    facts.setdefault("pad_vocabulary", like(base, 128))
    if (ratio := taken.argument("vision_downsample_ratio")) is not None and ratio.values[:1] == ("0.5",):
        facts["pixel_shuffle"] = ratio.fact(True)
    if (dropped := taken.argument("disable_vision_class_token", "add_class_token")) is not None:
        facts["drop_class_token"] = dropped.fact(True)
    window = taken.argument("window_size", "sliding_window")
    if window is not None:
        warnings.append(f"{window.written}: sliding windows are not read; attention is priced over the whole sequence")
    if taken.text("position_embedding_type") in ("", "learned_absolute") and not taken.on(
        "use_rotary_position_embeddings"
    ):
        warnings.append("learned positions are not priced: hidden x max-position-embeddings parameters are left out")
    _vocabulary(taken, facts, warnings)


def _vocabulary(taken: Taken, facts: dict[str, Fact], warnings: list[str]) -> None:
    known = facts.get("vocabulary")
    if known is not None and not is_unresolved(known.value):
        if known.key.endswith("padded-vocab-size") or "padded" in known.key:
            facts["pad_vocabulary"] = like(known, 1)
        return
    facts.pop("vocabulary", None)
    words = f"{taken.text('tokenizer_type')} {taken.text('vocab_file')} {taken.text('tokenizer_model')}".lower()
    words += f" {taken.text('tokenizer_name_or_path')} {taken.text('language_model_type')} {taken.text('hf_tokenizer')}"
    for pattern, size in _VOCABULARIES:
        if re.search(pattern, words, re.IGNORECASE):
            facts["vocabulary"] = Fact(
                value=size, file=taken.line.file, key=f"the tokenizer '{' '.join(words.split())[:40]}'"
            )
            return


def _known_name(taken: Taken, facts: dict[str, Fact], warnings: list[str]) -> None:
    """Of several --model the first that is no folder of a checkpoint."""
    fact = facts.get("model_name")
    earlier = taken.line.earlier.get("model", ())
    if fact is not None and earlier and fact.key == "--model" and "checkpoint" in str(fact.value):
        first = earlier[0]
        facts["model_name"] = first.fact(first.values[0] if first.values else "")
        warnings.append(
            f"{first.written} names a checkpoint the last time: {' '.join(first.values)[:80]} is taken as model"
        )


def head_facts(taken: Taken, facts: dict[str, Fact], warnings: list[str]) -> None:
    groups = taken.argument("num_query_groups", "num_key_value_heads")
    if groups is None or not groups.values:
        return
    grouped = taken.on("group_query_attention")
    if grouped or (grouped is None and groups.written.startswith("num_query_groups")):
        facts["kv_heads"] = groups.fact(groups.values[0])
    elif grouped is None and "--" in groups.written and "query" in groups.written:
        warnings.append(f"{groups.written} has no effect without --group-query-attention: every head has its own keys")
    elif "key_value" in groups.written:
        facts["kv_heads"] = groups.fact(groups.values[0])


def expert_facts(taken: Taken, facts: dict[str, Fact], warnings: list[str]) -> None:
    experts = facts.get("experts")
    if experts is None or str(experts.value) in ("1", "0", "[1]"):
        facts.pop("experts", None)
        return
    topk = facts.get("topk")
    if topk is None:
        facts["topk"] = like(experts, 2)
    if "sigmoid" in taken.text("moe_router_score_function"):
        facts["scoring"] = like(experts, "sigmoid")
    frequency = taken.argument("moe_layer_freq")
    if frequency is not None and frequency.values:
        text = "".join(frequency.values).strip("\"'").replace(" ", "")
        pattern = re.fullmatch(r"\(?\[0\]\*(\d{1,4})\+\[1\]\*(\d{1,4})\)?", text)
        ones = re.fullmatch(r"\[([01](?:,[01]){0,2000})\]", text)
        if pattern:
            facts["first_dense"] = frequency.fact(int(pattern[1]))
        elif ones and re.fullmatch(r"0*1+", ones[1].replace(",", "")):
            facts["first_dense"] = frequency.fact(ones[1].split(",").index("1"))
        elif 1 <= (whole(text) or 0) <= 100:
            facts["moe_every"] = frequency.fact(text)
        elif not re.fullmatch(r"\(?\[1\]\*\d+\)?", text):
            warnings.append(f"{frequency.written} {text[:40]}: not read; every layer is priced with experts")
    capacity = taken.argument("moe_expert_capacity_factor")
    if capacity is not None and capacity.values:
        facts["capacity_factor"] = capacity.fact(capacity.values[0])


def latent_facts(taken: Taken, facts: dict[str, Fact], warnings: list[str]) -> None:
    """Multi-head latent attention; widths not written are those of MLATransformerConfig."""
    if not taken.on("multi_latent_attention"):
        return
    facts.pop("qk_norm", None)  # --qk-layernorm then means the norms of the latents, which this attention always has
    base = taken.line.arguments["multi_latent_attention"].fact(True)
    for fact, name, default in (
        ("q_lora", "q_lora_rank", None),
        ("kv_lora", "kv_lora_rank", 512),
        ("qk_nope", "qk_head_dim", 128),
        ("qk_rope", "qk_pos_emb_head_dim", 64),
        ("v_dim", "v_head_dim", 128),
    ):
        found = taken.argument(name)
        if found is not None and found.values:
            facts[fact] = found.fact(found.values[0])
        elif default is not None:
            facts[fact] = like(base, default)


def training_facts(taken: Taken, facts: dict[str, Fact], warnings: list[str]) -> None:
    """LoRA and what is frozen, where flags other than --freeze-... say it."""
    tuner = taken.argument("tuner_type", "train_type", "sft_type", "finetuning_type", "use_lora", "lora_enable")
    word = (tuner.values[:1] or ("true",))[0].lower() if tuner is not None else ""
    if tuner is not None and (word.startswith(("lora", "qlora", "longlora")) or word in ("true", "llm")):
        facts["lora"] = tuner.fact("lora")
        if word == "lora_llm":
            facts.setdefault("freeze_vision", tuner.fact(False))
    elif tuner is not None and word not in ("full", "false"):
        warnings.append(f"{tuner.written} {word}: priced as if all weights that are not frozen are trained")
    elif tuner is not None:
        facts.pop("lora_rank", None)
    elif "lora_rank" in facts and taken.line.command:
        facts["lora"] = like(facts["lora_rank"], "lora")
    targets = taken.argument("target_modules", "lora_target", "lora_target_modules")
    if targets is not None:
        facts["lora_targets"] = targets.fact(" ".join(targets.values))
    if facts.get("lora_rank") is not None and str(facts["lora_rank"].value) == "0":
        del facts["lora_rank"]
        facts.pop("lora", None)
    _tower(taken, facts)
    adapter = taken.argument("tune_mm_mlp_adapter")
    if adapter is not None and taken.on("tune_mm_mlp_adapter"):
        facts["freeze_llm"], facts["freeze_vision"] = adapter.fact(True), adapter.fact(True)
    _tuned_parts(taken, facts)
    tiles = taken.argument("max_num_tiles", "max_dynamic_patch", "max_patch_grid")
    if tiles is not None and tiles.values:
        facts["tiles"] = tiles.fact(tiles.values[0])
        if taken.on("use_thumbnail"):
            facts["thumbnail"] = tiles.fact(True)


def _tuned_parts(taken: Taken, facts: dict[str, Fact]) -> None:
    """The parts that are trained, where arguments name these: the others are frozen.

    Qwen-VL's own scripts have a switch a part (qwenvl/train/argument.py, all off by default), LLaVA-NeXT's a list.
    """
    switches = (("freeze_vision", "tune_mm_vision"), ("freeze_projector", "tune_mm_mlp"), ("freeze_llm", "tune_mm_llm"))
    if (switch := taken.switch(*(name for _, name in switches))) is not None:
        facts |= {fact: switch.fact(not taken.on(name)) for fact, name in switches}
    parts = taken.argument("mm_tunable_parts")
    if parts is not None and parts.values:
        words = (("freeze_vision", "vision_tower"), ("freeze_projector", "mlp_adapter"), ("freeze_llm", "language"))
        facts |= {fact: parts.fact(word not in parts.values[0]) for fact, word in words}


# Words of a vision tower's name on the Hub -> our name for it.
_TOWERS = (
    ("siglip-so400m", "siglip"),
    ("siglip2-so400m", "siglip"),
    ("clip-vit-large-patch14", "clip"),
    ("internvit-300m", "internvit300m"),
    ("internvit-6b", "internvit"),
)


def _tower(taken: Taken, facts: dict[str, Fact]) -> None:
    """LLaVA's `--vision_tower`: frozen unless it is unfrozen, and its class token is not handed on."""
    tower = taken.argument("vision_tower", "mm_vision_tower")
    if tower is None or not tower.values:
        return
    name = tower.values[0].lower()
    facts["vision_type"] = tower.fact(next((kind for word, kind in _TOWERS if word in name), tower.values[0]))
    facts["drop_class_token"] = tower.fact(True)
    patch = re.search(r"patch(1[46]|32)\b", name)
    if patch is not None:
        facts["patch"] = tower.fact(patch[1])
    side = re.search(r"(?:patch\d{2}-|-)(224|256|336|384|448|512)\b", name)
    if side is not None or "clip" in name:
        pixels, width = int(side[1] if side is not None else 224), int(patch[1] if patch is not None else 14)
        facts["image_size"] = tower.fact(pixels - pixels % width)  # of SigLIP's 384 pixels 27 whole patches of 14
    backbone = taken.argument("freeze_backbone")  # of the language model, where a tower has a name of its own
    if backbone is not None:
        facts["freeze_llm"] = backbone.fact(bool(taken.on("freeze_backbone")))
    facts["freeze_vision"] = tower.fact(not taken.on("unfreeze_mm_vision_tower", "unlock_vision_tower"))
