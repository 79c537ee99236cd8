"""What a training log says of its configuration, as arguments: the dump of them and the lines about degrees."""

import re
from collections.abc import Iterator
from pathlib import Path

from mmplan.scenario.formats.launch.arguments import Argument

MOST_ARGUMENTS = 5_000
_DUMPED = re.compile(r"(?:^|\s)([A-Za-z_][\w-]{1,80})\s\.{3,}\s?(.{0,20000})$")
_WORLD = re.compile(r"using world size: (\d{1,7})\b")
_DEGREES = re.compile(
    r"\b((?:data|context|tensor-model|pipeline-model|expert-model|expert-tensor)-parallel)[ -]size: (\d{1,6})\b"
)
_INITIALISED = re.compile(r"initialized (tensor|pipeline) model parallel with size (\d{1,6})\b")
_PADDED = re.compile(r"padded vocab \(size: \d{1,9}\) with \d{1,9} dummy tokens \(new size: (\d{1,9})\)")
_CONSTANT = re.compile(r"setting number of micro-?batches to constant (\d{1,9})\b")
_DTYPE = re.compile(r"using torch\.(float16|bfloat16|float32|half) for parameters")
_NAMED = re.compile(
    r"(?<![A-Za-z0-9])gpus(\d{1,6})_tp(\d{1,5})_pp(\d{1,5})_cp(\d{1,5})_vp(\d{1,4}|None)_ep(\d{1,5})_mbs(\d{1,6})"
    r"_gbs(\d{1,8})(?![A-Za-z0-9])"
)
_NAMES = {
    "data-parallel": "data_parallel_size",
    "context-parallel": "context_parallel_size",
    "tensor-model-parallel": "tensor_model_parallel_size",
    "pipeline-model-parallel": "pipeline_model_parallel_size",
    "expert-model-parallel": "expert_model_parallel_size",
    "expert-tensor-parallel": "expert_tensor_parallel_size",
}
_OF_DEEPSPEED = {"zero_optimization_stage": "zero_stage"}  # of its dump: as Megatron-DeepSpeed calls it
_WORDS = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16"}


def starts_dump(text: str) -> bool:
    """Whether a line opens a dump of arguments, so that a run starts here."""
    return "----- arguments -----" in text


def arguments_in(text: str, line: int, file: Path) -> Iterator[tuple[str, Argument]]:
    """(name, argument) of a line; `certain` ones of the dump come as they stand there."""

    def argument(name: str, value: str, written: str) -> tuple[str, Argument]:
        return name, Argument(written=written, values=(value.strip(),), line=line, file=file)

    if "using torch" in text and (dtype := _DTYPE.search(text)) is not None:  # it ends as a line of the dump does
        if dtype[1] in _WORDS:
            yield argument(_WORDS[dtype[1]], "True", "using torch dtype")
        return
    if " ..." in text and (dumped := _DUMPED.search(text)) is not None:
        name = dumped[1].replace("-", "_").lower()
        yield argument(_OF_DEEPSPEED.get(name, name), dumped[2], dumped[1])
        return
    if (world := _WORLD.search(text)) is not None:
        yield argument("world_size", world[1], "using world size")
        for match in _DEGREES.finditer(text):
            yield argument(_NAMES[match[1]], match[2], f"{match[1]} size")
    if "size" not in text and "mbs" not in text and "micro" not in text:
        return
    if (started := _INITIALISED.search(text)) is not None:
        yield argument(f"{started[1]}_model_parallel_size", started[2], f"initialized {started[1]} model parallel")
    if (padded := _PADDED.search(text)) is not None:
        yield argument("padded_vocab_size", padded[1], "padded vocab")
    if (constant := _CONSTANT.search(text)) is not None:
        yield argument("constant_microbatches", constant[1], "number of micro-batches")
    if (named := _NAMED.search(text)) is not None:
        names = (
            "world_size",
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "expert_model_parallel_size",
            "micro_batch_size",
            "global_batch_size",
        )
        for name, value in zip(names, named.groups(), strict=True):
            if value.isdecimal():
                yield argument(name, value, "the experiment's name")
