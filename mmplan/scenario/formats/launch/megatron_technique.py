"""What Megatron's and the Trainer's arguments say of how a step runs: precision, states, recomputation, pipeline."""

import re
from collections.abc import Sequence

from mmplan.errors import InputError
from mmplan.scenario.formats.launch.facts import GIVE_IT_TOO, Fact, is_unresolved, whole
from mmplan.scenario.formats.launch.pipeline_layout import layout_stages
from mmplan.scenario.formats.launch.taken import Taken, like


def precision_facts(taken: Taken, facts: dict[str, Fact], warnings: list[str]) -> None:
    bf16, fp16 = taken.on("bf16"), taken.on("fp16")
    dtype = taken.text("torch_dtype", "dtype", "params_dtype").lower()
    found = taken.argument("bf16") or taken.argument("fp16") or taken.argument("torch_dtype", "dtype", "params_dtype")
    if bf16 and fp16:
        warnings.append("bf16 and fp16 both stand, of which a run takes one (two branches of a script?): bf16 is taken")
    word = "bf16" if bf16 or "bf" in dtype else "fp16" if fp16 or "16" in dtype or "half" in dtype else ""
    if found is not None and word:
        facts["precision"] = found.fact(word)
    elif "layers" in facts and taken.line.arguments.keys() & {"num_layers"}:
        facts["precision"] = Fact(value="fp32", file=taken.line.file, key="neither --bf16 nor --fp16")
    fp8 = taken.argument("fp8_format", "fp8", "fp8_hybrid")
    if fp8 is not None and (fp8.values[:1] or ("hybrid",))[0].lower() not in ("false", "none"):
        recipe = taken.text("fp8_recipe").lower()
        facts["fp8"] = fp8.fact("mx" if "mx" in recipe else "block" if "block" in recipe else "tensor")
        if word and bf16 and fp16:
            warnings.append(f"{fp8.written} may be of another branch of the script: FP8 is priced")


def state_facts(taken: Taken, facts: dict[str, Fact], warnings: list[str]) -> None:
    """Sharding, offload, reduction of gradients, optimizer."""
    fsdp = taken.argument("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp", "fsdp")
    strategy = str(facts.pop("dp_sharding").value).lower() if "dp_sharding" in facts else ""
    distributed = taken.argument("use_distributed_optimizer", "use_dist_optimizer")
    zero = taken.argument("zero_stage")
    named = [taken.argument(name) for name in ("deepspeed_config", "ds_config", "deepspeed")]
    deepspeed = next((argument for argument in named if argument is not None and argument.values), None)
    stages = {"0": "none", "1": "optimizer", "2": "gradients", "3": "parameters"}
    if fsdp is not None and taken.on("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp", "fsdp"):
        kinds = {"optim": "optimizer", "optim_grads": "gradients", "no_shard": "none"}
        number = zero.values[0] if zero is not None and zero.values else _fsdp_stage(fsdp.values)
        facts["sharding"] = fsdp.fact(kinds.get(strategy, stages.get(number, "parameters")))
    elif zero is not None and zero.values and zero.values[0] in stages:
        facts["sharding"] = zero.fact(stages[zero.values[0]])
    elif (
        deepspeed is not None
        and deepspeed.values
        and (stage := re.fullmatch(r"zero([0-3])(_offload)?", deepspeed.values[0]))
    ):
        facts["sharding"] = deepspeed.fact(stages[stage[1]])
        if stage[2]:
            facts["offload"] = deepspeed.fact("parameters" if stage[1] == "3" else "optimizer")
    elif distributed is not None and taken.on("use_distributed_optimizer", "use_dist_optimizer") is False:
        facts["sharding"] = distributed.fact("none")
    elif distributed is not None:
        facts["sharding"] = distributed.fact("optimizer")
    elif "layers" in facts and not (deepspeed is not None and deepspeed.values):
        facts["sharding"] = Fact(value="none", file=taken.line.file, key="no --use-distributed-optimizer")
    of_launcher = taken.argument("config_file") if "accelerate" in taken.line.command else None
    for beside in (deepspeed, of_launcher, taken.argument("yaml_cfg")):
        if beside is not None and beside.values and beside.values[0].endswith((".json", ".yaml", ".yml")):
            facts["second_file"] = beside.fact(beside.values[0])
            warnings.append(f"{beside.written} {beside.values[0]}: {GIVE_IT_TOO}")
    offload = taken.argument("optimizer_cpu_offload", "cpu_optimizer", "offload_optimizer")
    if offload is not None and taken.on("optimizer_cpu_offload", "cpu_optimizer", "offload_optimizer"):
        facts["offload"] = offload.fact("optimizer")
        part = taken.argument("optimizer_offload_fraction")
        if part is not None and part.values and part.values[0] not in ("1", "1.0"):
            warnings.append(f"{part.written} {part.values[0]}: the whole optimizer is priced as offloaded")
    kept = taken.argument("main_grads_dtype", "grad_reduce_in_bf16")
    if kept is not None and (kept.values[:1] == ("bf16",) or taken.on("grad_reduce_in_bf16")):
        facts["gradient_dtype"] = kept.fact("bf16")
    everything = taken.argument("fsdp_offload_params")
    if everything is not None and taken.on("fsdp_offload_params"):
        facts["offload"] = everything.fact("parameters")
    elif fsdp is not None and "offload" in _words(fsdp.values):
        facts["offload"] = fsdp.fact("parameters")
    if (overlap := taken.argument("overlap_grad_reduce")) is not None:
        facts["overlap_dp"] = overlap.fact(bool(taken.on("overlap_grad_reduce")))
    optimizer = taken.argument("optimizer", "optim")
    if optimizer is not None and optimizer.values:
        name = optimizer.values[0].lower()
        facts["optimizer"] = optimizer.fact("sgd" if name == "sgd" else "adamw")
        if name != "sgd" and "adam" not in name:
            warnings.append(
                f"{optimizer.written} {optimizer.values[0]} is priced as AdamW, with two moments per weight"
            )


def recompute_facts(taken: Taken, facts: dict[str, Fact], warnings: list[str]) -> None:
    kind, method = taken.argument("recompute_granularity"), taken.text("recompute_method")
    count = taken.argument("recompute_num_layers")
    old = taken.argument(
        "checkpoint_activations",
        "gradient_checkpointing",
        "deepspeed_activation_checkpointing",
        "activation_checkpointing",
        "grad_checkpoint",
    )
    short, off = taken.argument("recompute_activations"), taken.argument("disable_gradient_checkpointing")
    if kind is not None and kind.values and kind.values[0] in ("full", "selective"):
        facts["recompute"] = kind.fact(kind.values[0])
        modules = taken.argument("recompute_modules")
        if modules is not None and kind.values[0] == "selective" and set(_words(modules.values)) != {"core_attn"}:
            told = (
                f"{modules.written} {' '.join(modules.values)[:60]}: selective recomputation is priced as of attention"
            )
            warnings.append(f"{told} alone")
        if kind.values[0] == "full" and method == "block" and count is not None and count.values:
            if is_unresolved(count.values[0]):
                warnings.append(f"{count.written} = {count.values[0]} is set nowhere: every layer is priced recomputed")
            else:
                facts["recompute_layers"] = count.fact(count.values[0])
    elif old is not None:
        on = taken.on(
            "checkpoint_activations",
            "gradient_checkpointing",
            "deepspeed_activation_checkpointing",
            "activation_checkpointing",
            "grad_checkpoint",
        )
        facts["recompute"] = old.fact("full" if on else "none")
    elif off is not None:  # LLaMA-Factory
        facts["recompute"] = off.fact("none" if taken.on("disable_gradient_checkpointing") else "full")
    elif short is not None:
        facts["recompute"] = short.fact("selective" if taken.on("recompute_activations") else "none")
    elif "layers" in facts:
        facts["recompute"] = Fact(value="none", file=taken.line.file, key="no --recompute-granularity")


def pipeline_facts(taken: Taken, facts: dict[str, Fact], warnings: list[str]) -> None:
    layout = taken.argument("pipeline_model_parallel_layout")
    if layout is not None and layout.values:
        stages, pp = layout_stages(layout.values[0]), facts.get("pp")
        if stages is None:
            warnings.append(f"{layout.written} is not read")
        elif pp is not None and (ranks := whole(pp.value)):
            if stages % ranks:
                each = stages / ranks
                message = f"{stages} stages of the layout / pp {pp.value} = {each:g} per rank: no whole number"
                raise InputError(message, file=layout.file, line=layout.line, key=layout.written)
            facts["vp"] = layout.fact(stages // ranks)
            facts.pop("layers_per_chunk", None)
        warnings.append(f"{layout.written}: the cut it describes is not priced; stages are cut as is best")
    for name in (
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "first_pipeline_num_layers",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
    ):
        if (found := taken.argument(name)) is not None:
            warnings.append(f"{found.written}: stages are priced as cut as is best, not so")
    kinds = {
        "ulysses": "all-to-all",
        "a2a": "all-to-all",
        "megatron_cp_algo": "ring",
        "p2p": "ring",
        "all_gather": "gather",
        "hybrid_cp_algo": "ring",
    }
    found = taken.argument("cp_comm_type", "context_parallel_algo")
    if found is not None and found.values:
        facts["context_parallel"] = found.fact(
            next((kind for word, kind in kinds.items() if word in found.values[0]), "ring")
        )
    elif "cp" in facts and re.search("sequence_parallel_size|ulysses", facts["cp"].key):
        facts["context_parallel"] = like(facts["cp"], "all-to-all")


def attention_facts(taken: Taken, facts: dict[str, Fact], warnings: list[str]) -> None:
    backend = taken.argument("attention_backend", "attn_impl", "attn_implementation")
    kinds = {
        "flash_attention_3": "flash3",
        "flash_3": "flash3",
        "flash": "flash2",
        "fused": "cudnn",
        "unfused": "math",
        "eager": "math",
        "local": "math",
        "sdpa": "flash2",
    }
    if backend is not None and backend.values:
        kind = next((kind for word, kind in kinds.items() if word in backend.values[0].lower()), None)
        kind = "math" if "unfused" in backend.values[0].lower() else kind
        if kind is not None:
            facts["attention"] = backend.fact(kind)
            return
    flash = taken.argument("use_flash_attn", "use_flash_attn_v2", "use_flash_attention")
    if flash is not None and taken.on("use_flash_attn", "use_flash_attn_v2", "use_flash_attention"):
        facts["attention"] = flash.fact("flash2")
    elif taken.text("transformer_impl") == "local":
        facts["attention"] = Fact(value="math", file=taken.line.file, key="--transformer-impl local")
    if (fused := taken.argument("cross_entropy_loss_fusion", "use_liger_kernel")) is not None and taken.on(
        "cross_entropy_loss_fusion", "use_liger_kernel"
    ):
        facts["cross_entropy"] = fused.fact("fused")
    dropouts = [taken.argument("attention_dropout"), taken.argument("hidden_dropout")]
    values = [argument.values[0] for argument in dropouts if argument is not None and argument.values]
    if values and all(re.fullmatch(r"0*\.?0*", value) for value in values):
        facts["dropout"] = like(next(a for a in dropouts if a is not None).fact(False), False)
    elif "layers" in facts:
        facts["dropout"] = Fact(value=True, file=taken.line.file, key="--hidden-dropout")


def _words(values: Sequence[str]) -> list[str]:
    return " ".join(values).lower().replace(",", " ").replace(";", " ").split()


def _fsdp_stage(values: Sequence[str]) -> str:
    """ZeRO's stage of what `--fsdp` says (transformers/trainer_utils.py, FSDPOption)."""
    stages = {"shard_grad_op": "2", "hybrid_shard_zero2": "2", "no_shard": "0"}
    return next((stages[word] for word in _words(values) if word in stages), "3")


def stack_facts(taken: Taken, facts: dict[str, Fact], warnings: list[str]) -> None:
    """The generation of the software, from arguments that came or went with it."""
    names = taken.line.arguments
    command, fact = taken.line.command, Fact(value="", file=taken.line.file, key="the arguments")
    old = names.keys() & {
        "ddp_impl",
        "checkpoint_activations",
        "checkpoint_num_layers",
        "distribute_checkpointed_activations",
    }
    if {"zero_stage", "use_torch_fsdp2"} <= names.keys():
        stack = "torch-2025"  # Accelerate's strategy of FSDP
    elif "num_processes" in names and "num_layers" not in names:  # Accelerate, which drives DeepSpeed or torch
        stack = "deepspeed-2024" if "deepspeed" in names or taken.text("zero_stage") not in ("", "0") else "torch-2025"
    elif "deepspeed_config" in names or "zero_stage" in names:
        stack = "megatron-deepspeed-2024"
    elif old:
        stack = "megatron-2021"
    elif names.keys() & {"num_layers", "tensor_model_parallel_size", "use_mcore_models", "expert_model_parallel_size"}:
        stack = (
            "nemo-2025" if names.keys() & {"fp8_recipe", "attention_backend", "attn_implementation"} else "nemo-2024"
        )
    elif "deepspeed" in names or "deepspeed" in command:
        stack = "deepspeed-2024"
    elif names.keys() & {"per_device_train_batch_size", "model_name_or_path"}:
        stack = "torch-2025"
    else:
        return
    facts["stack"] = like(fact, stack)
