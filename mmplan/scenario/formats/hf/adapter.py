"""PEFT's adapter_config.json as the `train` part of a scenario."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmplan.errors import InputError
from mmplan.scenario.document import listed, shown
from mmplan.scenario.formats.reading import Reading

# Names of linears in transformers -> ours; fused ones get the adapters of their parts, which have other sizes.
TARGETS = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "out_proj": "o",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
MAX_RANK = 8_192


def adapter_reading(values: Mapping[str, Any], path: Path) -> Reading:
    """Rank and targets for the language model `llm`.

    Raises:
        InputError: another method than LoRA, or targets that are no linears of a block.
    """

    def error(key: str, message: str) -> InputError:
        return InputError(message, file=path, key=key)

    if values.get("peft_type") != "LORA":
        raise error("peft_type", f"expected 'LORA', found {shown(values.get('peft_type'))}")
    rank, named = values.get("r"), values.get("target_modules")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        raise error("r", f"expected a rank from 1 to {MAX_RANK:,}, found {shown(rank)}")
    for key in ("use_dora", "rank_pattern"):
        if values.get(key):
            raise error(key, f"{shown(values[key])} is not supported: every adapter has one rank and no magnitudes")
    if named == "all-linear":
        targets = list(dict.fromkeys(TARGETS.values()))
    elif isinstance(named, list) and named and all(isinstance(name, str) for name in named):
        unknown = [name for name in named if name.rpartition(".")[2] not in TARGETS]
        if unknown:
            raise error("target_modules", f"expected {listed(TARGETS, 20)}, found {shown(unknown[0])}")
        given = {TARGETS[name.rpartition(".")[2]] for name in named}
        targets = [target for target in dict.fromkeys(TARGETS.values()) if target in given]
    else:
        raise error("target_modules", f"expected a list of linears or 'all-linear', found {shown(named)}")
    kept = values.get("modules_to_save")
    warnings = ["names of linears say nothing of modules: adapters were given to the language model 'llm' alone"]
    if kept:
        warnings.append(f"modules_to_save: {listed(kept, 8) if isinstance(kept, list) else shown(kept)} train in full")
    return Reading(
        kind="hf",
        fragment={"train": {"llm": {"lora": {"rank": rank, "targets": targets}}}},
        read=(f"LoRA of rank {rank} on {listed(targets)}",),
        ignored=("lora_alpha, dropout and initialisation: no cost depends on them",),
        warnings=tuple(warnings),
    )
