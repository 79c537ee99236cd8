"""A plan as a launch script of Megatron-LM: model, degrees, pipeline layout, recomputation, batch.

Ranks of a plan are numbered as Megatron's default order does (tp, cp, ep, dp, pp, the first fastest; experts etp, ep,
dp, pp), so no mapping is needed. Encoders have no words on that command line: their layers stand in the first stage,
where Megatron's multimodal models build them.
"""

from shlex import quote

from mmplan.errors import CheckError
from mmplan.planner.check import require_structure
from mmplan.planner.formats.exported import Exported
from mmplan.planner.formats.language_chain import (
    language_stages,
    on_a_chain,
    the_language_model,
    without_spread,
)
from mmplan.planner.formats.linearised import Draft, each_alone, repriced, require_fit
from mmplan.planner.formats.megatron_layout import layout_text
from mmplan.planner.formats.megatron_model import Words, model_words
from mmplan.planner.formats.megatron_recompute import recompute_words
from mmplan.planner.formats.megatron_rules import (
    experts_with_sequence_parallel,
    refuse_adapters,
    refuse_uneven_exchange,
)
from mmplan.planner.formats.sequence_length import padded, sequence_length
from mmplan.planner.formats.simple_schedule import under_1f1b
from mmplan.planner.formats.torchrun_head import HEADER, title, torchrun_lines
from mmplan.planner.formats.unsaid import fp8_losses
from mmplan.planner.plan import Plan
from mmplan.scenario.scenario import ModelModule, Scenario

TARGET = "Megatron-LM"
VERSION = "megatron-core 0.19"
BACKENDS = {"math": "unfused", "flash1": "flash", "flash2": "flash", "flash3": "flash", "cudnn": "fused"}
CP_WAYS = {"ring": "p2p", "gather": "all_gather", "all-to-all": "a2a"}
RECIPES = {"tensor": "tensorwise", "block": "blockwise", "mx": "mxfp8"}
STRATEGIES = {"gradients": "optim_grads", "parameters": "optim_grads_params"}
DEFAULT_SEED = 1234  # Megatron's own; it refuses 0


def export_megatron(plan: Plan) -> Exported:
    """`megatron.sh`: `ENTRY=pretrain_gpt.py bash megatron.sh [further arguments]`, once on each node.

    Raises:
        CheckError: the plan is not sound, or needs what Megatron-LM lacks, or does not fit as it runs there.
    """
    require_structure(plan)
    module = the_language_model(plan, TARGET)
    model = model_words(module, plan.tp, TARGET)
    refuse_adapters(plan, TARGET)
    refuse_uneven_exchange(plan, module, TARGET)
    draft = as_megatron_runs(plan, module)
    made = draft.plan
    _refuse_offload(made)
    recompute = recompute_words(made, module, TARGET)
    parts = {
        "MODEL": (*model, *_inputs(made.scenario)),
        "PARALLEL": (*_parallel(made, module), *recompute.words),
        "TRAINING": _training(made, module),
    }
    return Exported(
        target="megatron",
        version=VERSION,
        files={"megatron.sh": _script(made, parts)},
        losses=(*draft.losses, *recompute.losses, *fp8_losses(plan, TARGET)),
        notes=(*_notes(made, module), *recompute.notes),
    )


def as_megatron_runs(plan: Plan, module: ModelModule) -> Draft:
    """The plan with Megatron's schedules, its place for encoders, its ways to shard and pad."""
    draft = _sharded(experts_with_sequence_parallel(under_1f1b(each_alone(plan, TARGET), TARGET), module, TARGET))
    draft = on_a_chain(without_spread(draft, TARGET), module, TARGET)
    draft = padded(draft, module, TARGET)
    require_fit(draft.plan, TARGET)
    return draft


def _sharded(draft: Draft) -> Draft:
    plan = draft.plan
    if plan.sharding not in STRATEGIES or len(plan.stages) == 1:
        return draft
    sentence = f"{TARGET} shards {plan.sharding} without a pipeline only: here it shards the optimizer's state"
    return draft.changed(repriced(plan, sharding="optimizer"), sentence)


def _inputs(scenario: Scenario) -> Words:
    """Sizes of images, which Megatron's multimodal models read."""
    for module in scenario.model.modules:
        if module.vision is not None:
            size = module.vision.image_size
            sides = () if size is None else ("--img-h", str(size), "--img-w", str(size))
            return (*sides, "--patch-dim", str(module.vision.patch), "--num-channels", str(module.vision.channels))
    return ()


def _parallel(plan: Plan, module: ModelModule) -> Words:
    technique = plan.scenario.technique
    words: Words = ("--tensor-model-parallel-size", str(plan.tp), "--pipeline-model-parallel-size", str(plan.pp))
    if len(plan.stages) > 1:
        words += ("--pipeline-model-parallel-layout", layout_text(language_stages(plan, module)))
    words += ("--context-parallel-size", str(plan.cp))
    if plan.cp > 1:
        words += ("--cp-comm-type", CP_WAYS[technique.context_parallel])
    if module.transformer is not None and module.transformer.moe is not None:
        words += ("--expert-model-parallel-size", str(plan.ep))
        words += ("--expert-tensor-parallel-size", str(plan.etp if plan.ep > 1 else plan.tp))
    if technique.sequence_parallel and plan.tp > 1:
        words += ("--sequence-parallel",)
    if plan.sharding == "optimizer":
        words += ("--use-distributed-optimizer",)
    if plan.sharding in STRATEGIES:
        words += ("--use-megatron-fsdp", "--data-parallel-sharding-strategy", STRATEGIES[plan.sharding])
        words += ("--use-distributed-optimizer", "--ckpt-format", "fsdp_dtensor")
    return words


def _refuse_offload(plan: Plan) -> None:
    """Its offloaded state is that of the distributed optimizer (megatron/core/optimizer/optimizer_config.py)."""
    if plan.scenario.technique.offload == "parameters":
        raise CheckError(f"{TARGET} keeps no weights in host memory, the plan does (offload: parameters)")
    if plan.scenario.technique.host_activations:
        raise CheckError(
            f"{TARGET} keeps activations in host memory of fewer than all blocks, without stages or recomputation "
            f"(cpu_offloading_num_layers), the plan those of all (offload: {plan.scenario.technique.offload})"
        )
    ours = plan.sharding == "optimizer" and plan.scenario.optimizer.name == "adamw"
    if plan.scenario.technique.host_states == "optimizer" and not ours:
        name = plan.scenario.optimizer.name
        raise CheckError(
            f"{TARGET} keeps optimizer state in host memory for its distributed AdamW; the plan has {name} "
            f"with sharding {plan.sharding}"
        )


def _training(plan: Plan, module: ModelModule) -> Words:
    scenario, technique = plan.scenario, plan.scenario.technique
    length, dropout = sequence_length(plan, module), "0.1" if technique.dropout else "0.0"
    words: Words = ("--micro-batch-size", str(plan.microbatch_size), "--global-batch-size", str(scenario.global_batch))
    words += ("--seq-length", str(length), "--max-position-embeddings", str(length))
    words += () if scenario.precision == "fp32" else (f"--{scenario.precision}",)
    words += () if technique.fp8 == "none" else ("--fp8-format", "hybrid", "--fp8-recipe", RECIPES[technique.fp8])
    words += ("--grad-reduce-in-bf16",) if scenario.optimizer.gradient_dtype == "bf16" else ()
    words += ("--attention-backend", BACKENDS[technique.attention])
    words += ("--attention-dropout", dropout, "--hidden-dropout", dropout)
    words += () if technique.cross_entropy == "plain" else ("--cross-entropy-loss-fusion",)
    words += ("--optimizer", "adam" if scenario.optimizer.name == "adamw" else "sgd")
    if technique.host_states == "optimizer":
        words += ("--optimizer-cpu-offload", "--use-precision-aware-optimizer")
    words += ("--lr", f"{scenario.optimizer.learning_rate:g}", "--seed", str(scenario.seed or DEFAULT_SEED))
    return words


def _script(plan: Plan, parts: dict[str, Words]) -> str:
    connections = (
        "unset CUDA_DEVICE_MAX_CONNECTIONS" if plan.sharding in STRATEGIES else ("export CUDA_DEVICE_MAX_CONNECTIONS=1")
    )
    lines = [HEADER, f"# {title(plan, TARGET)}", "set -euo pipefail", connections]
    alone = len(plan.scenario.model.modules) == 1
    entry = (
        "-pretrain_gpt.py" if alone else "?your entry script, which builds the encoders (examples/multimodal/train.py)"
    )
    lines += [f"ENTRY=${{ENTRY:{entry}}}", ""]
    lines += torchrun_lines(plan)
    for name, words in parts.items():
        lines += ["", f"{name}=(", *(f"  {line}" for line in _by_flag(words)), ")"]
    lines += ["", "# Your data and length of training; made-up data without."]
    lines += ["DATA=(${DATA:---mock-data --tokenizer-type NullTokenizer --train-iters 100 --eval-iters 0})", ""]
    arrays = " ".join(f'"${{{name}[@]}}"' for name in (*parts, "DATA"))
    return "\n".join([*lines, f'"${{TORCHRUN[@]}}" "$ENTRY" {arrays} "$@"']) + "\n"


def _by_flag(words: Words) -> list[str]:
    """One line per argument with its values."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {quote(word)}"
    return lines


def _notes(plan: Plan, module: ModelModule) -> tuple[str, ...]:
    others = [one for one in plan.scenario.model.modules if one.name != module.name]
    frozen = [one.name for one in plan.scenario.model.modules if one.training.mode == "frozen"]
    notes = [
        "from the environment: ENTRY, your entry script; DATA, arguments for your data, tokenizer and number of steps"
    ]
    notes.append("rotary base and norm epsilon are the checkpoint's: add --rotary-base and --norm-epsilon")
    if others:
        names = " and ".join(one.name for one in others)
        notes.append(f"{names}: no words of this command line; your entry script builds them in the first stage")
    if frozen:
        notes.append(
            f"the plan keeps {' and '.join(frozen)} frozen: examples/multimodal has --freeze-ViT and --freeze-LM"
        )
    if any(edge.kind == "add" for edge in plan.scenario.model.edges):
        notes.append(
            "DeepStack is in Megatron-Bridge's Qwen3-VL; its blocks stand in the first stage, as that model wants"
        )
    if plan.composition != "in order":
        notes.append(f"the plan composes microbatches ({plan.composition}): your data loader has to")
    return tuple(notes)
