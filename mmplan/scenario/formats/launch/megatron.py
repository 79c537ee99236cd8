"""Arguments of Megatron-LM and its forks (Megatron-DeepSpeed, Pai, Long-VITA, ms-swift, Megatron-Bridge), and of the
Hugging Face Trainer, as facts of a training run.
"""

import math
import re
from collections.abc import Mapping

from mmplan.errors import InputError
from mmplan.scenario.document import listed
from mmplan.scenario.formats.launch.arguments import CommandLine
from mmplan.scenario.formats.launch.facts import Fact, SetUp, is_unresolved, whole
from mmplan.scenario.formats.launch.megatron_model import (
    expert_facts,
    head_facts,
    latent_facts,
    model_facts,
    training_facts,
)
from mmplan.scenario.formats.launch.megatron_technique import (
    attention_facts,
    pipeline_facts,
    precision_facts,
    recompute_facts,
    stack_facts,
    state_facts,
)
from mmplan.scenario.formats.launch.not_priced import NOT_PRICED, REFUSED, UNMODELLED
from mmplan.scenario.formats.launch.taken import Taken, like

# Argument -> fact, where the value is taken as it stands. Several spellings: the first that a file has counts.
_VALUES: Mapping[str, tuple[str, ...]] = {
    "nodes": ("nnodes", "num_nodes", "nodes", "num_machines", "actor_num_nodes"),
    "per_node": ("nproc_per_node", "num_gpus", "gpus_per_node", "num_gpus_per_node", "actor_num_gpus_per_node"),
    "world": ("world_size", "num_processes"),
    "tp": (
        "tensor_model_parallel_size",
        "tensor_parallel_size",
        "tensor_parallel",
        "model_parallel_size",
        "tp",
        "llm_tp",
    ),
    "pp": ("pipeline_model_parallel_size", "pipeline_parallel_size", "pipeline_parallel", "pp", "llm_pp"),
    "cp": ("context_parallel_size", "sequence_parallel_size", "ulysses_size", "cp", "llm_cp"),
    "ep": ("expert_model_parallel_size", "expert_parallel_size", "moe_expert_parallel_size", "ep", "llm_ep"),
    "etp": ("expert_tensor_parallel_size", "etp", "llm_expt_tp"),
    "dp": ("llm_dp", "dp"),
    "vp": ("num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size", "vpp"),
    "layers_per_chunk": ("num_layers_per_virtual_pipeline_stage",),
    "microbatch": ("micro_batch_size", "per_device_train_batch_size", "batch_size_per_gpu"),
    "global_batch": ("global_batch_size", "train_batch_size"),
    "accumulation": ("gradient_accumulation_steps",),
    "layers": ("num_layers",),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "head_dim": ("kv_channels",),
    "ffn": ("ffn_hidden_size",),
    "sequence": (
        "decoder_seq_length",
        "seq_length",
        "max_length",
        "model_max_length",
        "max_seq_length",
        "cutoff_len",
        "encoder_seq_length",
        "max_seq_len",
    ),
    "vocabulary": ("padded_vocab_size", "vocab_size"),
    "pad_vocabulary": ("make_vocab_size_divisible_by",),
    "experts": ("num_experts", "num_moe_experts"),
    "topk": ("moe_router_topk", "topk"),
    "expert_ffn": ("moe_ffn_hidden_size",),
    "shared_ffn": ("moe_shared_expert_intermediate_size",),
    "patch": ("patch_dim",),
    "image_size": ("img_h", "image_size", "force_image_size"),
    "vision_type": ("vision_model_type",),
    "language_type": ("language_model_type",),
    "tower": ("vision_tower",),
    "model_name": ("model", "model_name_or_path", "hf_model", "hf_model_path", "model_id", "load_hf"),
    "lora_rank": ("lora_rank", "lora_r", "use_llm_lora"),
    "dp_sharding": ("data_parallel_sharding_strategy",),
}
_SWITCHES: Mapping[str, tuple[str, ...]] = {
    "freeze_llm": ("freeze_lm", "freeze_llm", "language_model_freeze", "freeze_language_model"),
    "freeze_vision": (
        "freeze_vit",
        "vision_model_freeze",
        "freeze_vision_model",
        "freeze_vision_tower",
        "freeze_backbone",
    ),
    "freeze_projector": (
        "freeze_aligner",
        "freeze_mlp",
        "freeze_projection",
        "freeze_vision_projection",
        "freeze_multi_modal_projector",
    ),
    "sequence_parallel": ("sequence_parallel",),
    "pixel_shuffle": ("pixel_shuffle",),
}
# What decides about degrees, batch and length: such arguments need a value that the file itself sets.
_NEEDED = (
    "tp",
    "pp",
    "cp",
    "ep",
    "etp",
    "dp",
    "microbatch",
    "global_batch",
    "accumulation",
    "layers",
    "hidden",
    "heads",
    "ffn",
    "sequence",
    "experts",
    "topk",
    "expert_ffn",
    "kv_heads",
)


_MEGATRON_KINDS = ("megatron", "megatron-log", "ms-swift", "nemo", "llama-factory")
NEEDED_ARGUMENTS = frozenset(name for fact in _NEEDED for name in _VALUES.get(fact, ()))


def megatron_set_up(line: CommandLine, kind: str = "megatron") -> SetUp:
    """What the arguments say.

    Raises:
        InputError: a script that does not train, or an argument that is needed and has no value.
    """
    _refuse_other_tools(line)
    taken = Taken(line)
    facts: dict[str, Fact] = {}
    warnings = list(line.warnings)
    for fact, names in _VALUES.items():
        found = taken.argument(*names)
        if found is None:
            continue
        if not found.values:
            if fact in _NEEDED:
                raise InputError(f"expected a value behind {found.written}", file=found.file, line=found.line)
            continue
        facts[fact] = found.fact(found.values[0])
    for fact, names in _SWITCHES.items():
        found, on = taken.switch(*names), taken.on(*names)
        if found is not None and on is not None:
            facts[fact] = found.fact(on)
    for special in (
        _components,
        _launcher,
        _batch,
        model_facts,
        head_facts,
        expert_facts,
        latent_facts,
        precision_facts,
        state_facts,
        recompute_facts,
        pipeline_facts,
        attention_facts,
        training_facts,
        stack_facts,
    ):
        special(taken, facts, warnings)
    if "etp" not in facts and "ep" in facts and kind == "ms-swift":
        facts["etp"] = like(facts["ep"], 1)
        warnings.append("expert_tensor_parallel_size is not written: 1, as of ms-swift 3.9 (before: that of tensors)")
    elif "etp" not in facts and "tp" in facts and "ep" in facts and kind in _MEGATRON_KINDS:
        facts["etp"] = facts["tp"]  # Megatron's default (megatron/training/arguments.py, expert_tensor_parallel_size)
    _refuse_open_values(facts, line)
    if not facts.keys() - {"nodes", "per_node", "world", "stack", "precision", "optimizer", "overlap_dp"}:
        raise InputError("no degrees, batch or sizes of a model among the arguments", file=line.file)
    _not_priced(taken, warnings)
    return SetUp(
        kind=kind,
        files=(line.file,),
        facts=facts,
        ignored=_ignored(taken),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _refuse_other_tools(line: CommandLine) -> None:
    for marks, what in REFUSED:
        have = [name for name in marks if name in line.arguments]
        if len(have) == len(marks):
            found = line.arguments[have[0]]
            raise InputError(
                f"{what} (it has {found.written}): no training is described", file=line.file, line=found.line
            )
    for name, what in UNMODELLED.items():
        argument = line.arguments.get(name)
        if argument is not None and argument.values[:1] not in (("None",), ("False",), ("false",), ("0",), ("0.0",)):
            raise InputError(f"{argument.written}: {what}", file=line.file, line=argument.line)
    of_t5 = line.arguments.get("decoder_num_layers")
    if of_t5 is not None and of_t5.values[:1] != ("None",) and "num_layers" not in line.arguments:
        message = f"{of_t5.written}: models of encoder and decoder (T5) are not modelled"
        raise InputError(message, file=line.file, line=of_t5.line)
    other = re.search(r"pretrain_(bert|t5|ict|retro|vision\w*|mamba|biencoder)\w*\.py", line.command)
    if other is not None:
        raise InputError(f"{other[0]}: only causal language models and those with encoders are read", file=line.file)


def _launcher(taken: Taken, facts: dict[str, Fact], warnings: list[str]) -> None:
    """Processes from srun's and Slurm's options and from variables of launchers: the last number that stands."""
    for fact in ("nodes", "per_node", "world"):
        every = [
            a
            for name in _VALUES[fact]
            for a in (*taken.line.earlier.get(name, ()), taken.line.arguments.get(name))
            if a is not None and a.values and re.fullmatch(r"\d+(:\d+)?[,)]?", a.values[0])
        ]
        if every and (fact not in facts or not re.match(r"\d", str(facts[fact].value))):
            facts[fact] = every[-1].fact(every[-1].values[0])
        # `srun --nodes=1 hostname` asks for a name, so ones contradict nothing
        several = {a.values[0].strip("),"): a for a in every if a.values[0].strip("),") != "1"}
        if len(several) > 1:
            told = ", ".join(f"line {a.line} {a.written} = {value}" for value, a in list(several.items())[:4])
            warnings.append(f"{told} contradict each other: {facts[fact].place} = {facts[fact].value} is taken")
    tasks = taken.argument("ntasks_per_node")
    if "per_node" not in facts and (gres := taken.argument("gres", "gpus_per_task")) is not None:
        count = re.search(r"([0-9]{1,6})$", gres.values[0]) if gres.values else None
        if count:
            facts["per_node"] = gres.fact(count[1])
    if "per_node" not in facts and tasks is not None and tasks.values and tasks.values[0] not in ("1",):
        facts["per_node"] = tasks.fact(tasks.values[0])
    for fact, names in (
        ("per_node", ("NPROC_PER_NODE", "GPUS_PER_NODE", "N_GPUS_PER_NODE", "NUM_GPUS", "GPU_NUM")),
        ("nodes", ("NNODES", "NUM_NODES", "SLURM_NNODES")),
        ("world", ("WORLD_SIZE", "NUM_PROCESSES")),
    ):
        for name in names:
            value = taken.line.variables.get(name, "")
            known = facts.get(fact)
            if fact == "world" and {"nodes", "per_node"} <= facts.keys():
                continue  # some launchers call the number of nodes so
            number = whole(value)
            if number and (known is None or is_unresolved(known.value)):
                facts[fact] = Fact(value=number, file=taken.line.file, key=name)
    _pixels(taken, facts)
    devices = taken.line.variables.get("CUDA_VISIBLE_DEVICES", "")
    if "per_node" not in facts and re.fullmatch(r"\d{1,3}(,\d{1,3}){0,127}", devices):
        facts["per_node"] = Fact(value=devices.count(",") + 1, file=taken.line.file, key="CUDA_VISIBLE_DEVICES")
    for fact in ("nodes", "per_node", "world"):
        known = facts.get(fact)
        if known is None:
            continue
        value = str(known.value).strip("(),")
        if is_unresolved(known.value):
            warnings.append(f"{known.place} = {known.value} is set nowhere in the file")
            del facts[fact]
        elif re.fullmatch(r"(\d+):\d+", value):  # elastic: 1:4 nodes
            facts[fact] = Fact(value=value.split(":")[0], file=known.file, line=known.line, key=known.key)
        elif number := whole(value):
            facts[fact] = Fact(value=number, file=known.file, line=known.line, key=known.key)
        else:
            del facts[fact]


def _pixels(taken: Taken, facts: dict[str, Fact]) -> None:
    """The side of a square image of the most pixels, of ms-swift and the processors of Qwen-VL."""
    given = taken.argument("max_pixels", "image_max_pixels")
    pixels = Fact(value=taken.line.variables.get("MAX_PIXELS", ""), file=taken.line.file, key="MAX_PIXELS")
    if given is not None and given.values:
        pixels = given.fact(given.values[0])
    if re.fullmatch(r"\d{2,9}", str(pixels.value)) and "image_size" not in facts:
        facts["image_size"] = like(pixels, round(math.sqrt(int(str(pixels.value)))))


def _components(taken: Taken, facts: dict[str, Fact], warnings: list[str]) -> None:
    """Megatron-Bridge's `--component language=tp=4,pp=1,...`: the language model's degrees."""
    last = taken.argument("component")
    if last is None:
        return
    for argument in (*taken.line.earlier.get("component", ()), last):
        name, _, pairs = "".join(argument.values).partition("=")
        if name not in ("language", "llm", "language_model"):
            warnings.append(
                f"{argument.written} {name[:40]}: its own devices are not read; the recipe holds the language model's"
            )
            continue
        for key, _, value in (pair.partition("=") for pair in pairs.split(",")[:20]):
            if key in ("tp", "pp", "cp", "ep", "dp"):
                facts[key] = argument.fact(value)


def _batch(taken: Taken, facts: dict[str, Fact], warnings: list[str]) -> None:
    if (rampup := taken.argument("rampup_batch_size", "step_batch_size_schedule")) is not None:
        warnings.append(f"{rampup.written}: the batch grows during the run; priced is the full global batch")
    for name in ("seq_length", "encoder_seq_length"):
        other, chosen = taken.line.arguments.get(name), facts.get("sequence")
        if other is not None and chosen is not None and chosen.key != other.written:
            taken.names.add(name)


def _refuse_open_values(facts: Mapping[str, Fact], line: CommandLine) -> None:
    """All needed arguments whose value no line sets, in one sentence."""
    missing = [fact for name, fact in facts.items() if name in _NEEDED and is_unresolved(fact.value)]
    if not missing:
        return
    told = listed((f"{fact.key} {' '.join(str(fact.value).split())[:40]}" for fact in missing), 8)
    message = f"{told}: no line sets these values; write them into the file and import it again"
    raise InputError(message, file=line.file, line=missing[0].line)


def _not_priced(taken: Taken, warnings: list[str]) -> None:
    for name, why in NOT_PRICED.items():
        found = taken.line.arguments.get(name)
        if found is None or (taken.on(name) is False) or found.values[:1] in (("None",), ("0",)):
            continue
        taken.names.add(name)
        warnings.append(f"{found.written}: {why}")


def _ignored(taken: Taken) -> tuple[str, ...]:
    rest = [argument.written for name, argument in taken.line.arguments.items() if name not in taken.names]
    if not rest:
        return ()
    return (f"{len(rest)} arguments that say nothing of sizes, degrees or precision: {listed(rest, 200)}",)
