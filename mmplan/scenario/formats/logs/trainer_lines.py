"""What the Hugging Face Trainer says at its end, and what it, torchtitan and DeepSpeed say of the run at the start."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mmplan.scenario.formats.launch.arguments import Argument
from mmplan.scenario.formats.logs.other_steps import number_of

# transformers/trainer_utils.py, speed_metrics: of the whole training, evaluations and checkpoints included
_SUMMARY = re.compile(r"\btrain_(runtime|samples_per_second|steps_per_second)['\"]?\s*[:=]\s*['\"]?([\d.:]{1,20})")
_STEPS = re.compile(r"['\"](?:global_step|max_steps)['\"]:\s*(\d{1,12})\s*[,}\n]?\s*$")
_TOTAL = re.compile(r"\bTotal (?:optimization )?steps = ([\d,]{1,20})")
_EPOCHS = re.compile(r"\bNum Epochs = ([\d,]{1,12})")
_HF = {
    "per_device_train_batch_size": re.compile(r"(?i)\bbatch size per device = ([\d,]{1,15})"),
    "global_batch_size": re.compile(r"\bTotal (?:train )?batch size \([^)\n]{1,80}\) = ([\d,]{1,15})"),
    "gradient_accumulation_steps": re.compile(r"(?i)\bgradient accumulation steps = ([\d,]{1,15})"),
    "world_size": re.compile(r"\bNum GPUs used = (\d{1,7})\b"),
}
_DEEPSPEED_MICRO = re.compile(r"\btrain_micro_batch_size_per_gpu\s[.\s]{0,20}(\d{1,9})\s*$")
_TITAN_MESH = re.compile(r"Building \d-D device mesh with \[([^\]]{1,200})\], \[([\d, ]{1,100})\]")
_TITAN_DEGREES = re.compile(r"Building device mesh with parallelism: ([a-z_]+=\d{1,7}(?:, [a-z_]+=\d{1,7}){1,10})")
_TITAN_BATCH = re.compile(
    r"local batch size (\d{1,9}), global batch size (\d{1,9}),(?: gradient accumulation steps (\d{1,9}),)?"
    r" sequence length (\d{1,9})"
)
_TITAN_PARAMETERS = re.compile(r"\bModel (?:(\S{1,60}) (\S{1,60}) )?size: ([\d,]{1,25}) total parameters")
_TITAN_APPLIED = re.compile(r"\bApplied (full|selective) activation checkpointing|\bApplied (FSDP|HSDP)\b")
# What these lines say has no argument of another framework; `torchtitan_facts.py` reads it.
LOCAL_BATCH, MODEL, RECOMPUTE, FSDP = "titan_local_batch", "titan_model", "titan_recompute", "titan_fsdp"
_NAMES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
_WORLD = ("pp", "dp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(slots=True)
class Summary:
    """What the end of a training says of it; 0 where it does not."""

    runtime_s: float = 0.0
    samples_per_s: float = 0.0
    steps_per_s: float = 0.0
    steps: int = 0
    epochs: int = 0

    def add(self, text: str) -> None:
        """What a line says; of several the last one counts."""
        for match in _SUMMARY.finditer(text) if "train_" in text else ():
            name = "runtime_s" if match[1] == "runtime" else match[1].replace("_second", "_s")
            value = _clock(match[2]) if ":" in match[2] else number_of(match[2])
            if value is not None and value > 0:
                setattr(self, name, value)
        if "step" in text and (steps := _TOTAL.search(text) or _STEPS.search(text)) is not None:
            self.steps = int(number_of(steps[1]) or 0)
        if "Num Epochs" in text and (epochs := _EPOCHS.search(text)) is not None:
            self.epochs = int(number_of(epochs[1]) or 0)

    @property
    def step_s(self) -> float | None:
        """Mean seconds of a step; of a printed rate only where its three decimals say it within 1 %."""
        if self.runtime_s and self.steps:
            return self.runtime_s / self.steps
        return 1 / self.steps_per_s if self.steps_per_s >= 0.05 else None

    @property
    def batch(self) -> int | None:
        """Samples of a step, where the two rates, which are rounded to three decimals, leave one whole number."""
        if self.steps_per_s < 0.0005 or not self.samples_per_s:
            return None
        least = (self.samples_per_s - 0.0005) / (self.steps_per_s + 0.0005)
        most = (self.samples_per_s + 0.0005) / (self.steps_per_s - 0.0005)
        found = range(math.ceil(least), math.floor(most) + 1)
        return found[0] if len(found) == 1 and found[0] > 0 else None


def _clock(text: str) -> float | None:
    """`1:02:03.45` as seconds."""
    parts = text.split(":")
    if len(parts) != 3 or not all(re.fullmatch(r"\d{1,6}(\.\d{0,6})?", part) for part in parts):
        return None
    return (float(parts[0]) * 60 + float(parts[1])) * 60 + float(parts[2])


def trainer_arguments_in(text: str, line: int, file: Path) -> Iterator[tuple[str, Argument]]:
    """(name, argument), as Megatron's arguments and those of the Hugging Face Trainer are called."""

    def argument(name: str, value: str, written: str) -> tuple[str, Argument]:
        return name, Argument(written=written, values=(value.replace(",", ""),), line=line, file=file)

    if " = " in text:
        for name, pattern in _HF.items():
            if (found := pattern.search(text)) is not None:
                yield argument(name, found[1], found[0].partition(" = ")[0])
    if "micro_batch_size_per_gpu" in text and (micro := _DEEPSPEED_MICRO.search(text)) is not None:
        yield argument("per_device_train_batch_size", micro[1], "train_micro_batch_size_per_gpu")
    if "device mesh" in text:
        degrees = _degrees(text)
        if degrees:
            world = 1
            for axis in _WORLD:
                world *= degrees.get(axis, 1)
            yield argument("world_size", str(world), "device mesh")
            for axis, name in _NAMES.items():
                if axis in degrees:
                    yield argument(name, str(degrees[axis]), f"device mesh {axis}")
    if "local batch size" in text and (batch := _TITAN_BATCH.search(text)) is not None:
        yield argument(LOCAL_BATCH, batch[1], "local batch size")
        yield argument("global_batch_size", batch[2], "global batch size")
        yield argument("seq_length", batch[4], "sequence length")
    if "total parameters" in text and (model := _TITAN_PARAMETERS.search(text)) is not None and model[1]:
        yield argument(MODEL, f"{model[1]}-{model[2]}", f"Model {model[1]} {model[2]}")
    if "Applied " in text and (applied := _TITAN_APPLIED.search(text)) is not None:
        yield argument(RECOMPUTE if applied[1] else FSDP, applied[1] or applied[2], applied[0])


def _degrees(text: str) -> dict[str, int]:
    if (named := _TITAN_DEGREES.search(text)) is not None:
        return {key: int(value) for key, _, value in (pair.partition("=") for pair in named[1].split(", "))}
    if (mesh := _TITAN_MESH.search(text)) is None:
        return {}
    axes = re.findall(r"['\"](\w{1,20})['\"]", mesh[1])
    sizes = re.findall(r"\d{1,7}", mesh[2])
    return {axis: int(size) for axis, size in zip(axes, sizes, strict=False)} if len(axes) == len(sizes) else {}


def titan_parameters_in(text: str) -> int | None:
    """Parameters of the whole model, as torchtitan prints them."""
    found = _TITAN_PARAMETERS.search(text) if "total parameters" in text else None
    return int(found[3].replace(",", "")) or None if found is not None else None
