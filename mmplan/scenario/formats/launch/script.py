"""Launch scripts and argument lists as set-ups, and a model's config.json that stands beside them."""

import re
from dataclasses import replace
from pathlib import Path

from mmplan.scenario.formats.hf_config import read_hf_config
from mmplan.scenario.formats.launch.arguments import Argument, CommandLine, read_command_line
from mmplan.scenario.formats.launch.comments import hinted_devices, measured_comment
from mmplan.scenario.formats.launch.facts import Fact, SetUp
from mmplan.scenario.formats.launch.framework_yaml import looks_like_framework, overriding, read_framework
from mmplan.scenario.formats.launch.megatron import megatron_set_up
from mmplan.scenario.formats.logs.reading import log_set_up, looks_like_megatron_log
from mmplan.scenario.formats.reading import Head, read_head

_ARGUMENT = re.compile(
    r"(?m)(?:^|[\s\"'(])--(?:num[-_]layers|hidden[-_]size|tensor[-_]model[-_]parallel[-_]size|micro[-_]batch[-_]size"
    r"|pipeline[-_]model[-_]parallel[-_]size|global[-_]batch[-_]size|expert[-_]model[-_]parallel[-_]size|seq[-_]length"
    r"|per_device_train_batch_size|model_name_or_path|use[-_]distributed[-_]optimizer|tokenizer[-_]type|nproc[-_]per[-_]node"
    r"|hf[-_]model|recipe|deepspeed|num_processes)\b"
    r"|(?:^|\s)\+{0,2}(?:model\.(?:tensor|pipeline)_model_parallel_size|trainer\.(?:devices|num_nodes))="
)
_NO_TUNER = Argument(written="", values=(), line=0, file=Path())
_SWIFT_YAML = looks_like_framework("ms-swift")
_LIST = re.compile(r"(?:\s*(?:#[^\n]*)?\n)*\s*--?[A-Za-z]")


def looks_like_script(head: Head) -> bool:
    """A list of arguments, or a shell script, with arguments that training takes."""
    if head.text.lstrip()[:1] in ("{", "[", "<"):
        return False
    is_script = head.path.suffix in (".sh", ".args", ".slurm", ".sbatch", ".bash") or head.text.startswith("#!")
    return (is_script or _LIST.match(head.text) is not None) and _ARGUMENT.search(head.text) is not None


def read_script(path: Path) -> SetUp:
    """What a script, a list of arguments, or the arguments that a log prints say.

    Raises:
        InputError: no training command, a tool that does not train, or a value that is needed and set nowhere.
    """
    if looks_like_megatron_log(read_head(path)):
        return log_set_up("megatron-log")(path)
    line = read_command_line(path)
    swift = re.search(r"\b(megatron|swift) (sft|pt|rlhf)\b", line.command) or "tuner_type" in line.arguments
    if line.overrides:
        line = replace(line, arguments={**overriding("nemo", line.overrides), **line.arguments})
    setup = megatron_set_up(line, "ms-swift" if swift else "nemo" if line.overrides else "megatron")
    if swift:
        told = {name: fact for name, fact in setup.facts.items() if not fact.key.startswith("no --recompute")}
        setup = replace(setup, facts=_swift_defaults(line) | told)
    measured, sentence = measured_comment(line.comments, path)
    facts = hinted_devices(line.comments, path) | measured | dict(setup.facts)
    if "gpu" not in setup.facts:
        facts |= _requested_gpu(line)
    return SetUp(
        kind=setup.kind,
        files=setup.files,
        facts=facts,
        read=(*setup.read, *filter(None, [sentence])),
        ignored=setup.ignored,
        warnings=setup.warnings,
    )


def _swift_defaults(line: CommandLine) -> dict[str, Fact]:
    """What ms-swift does unless it is told otherwise (its command-line parameters): the encoder and aligner are frozen,
    `megatron sft` takes 16 samples a step and recomputes selectively, `swift sft` trains adapters, recomputing all."""

    def fact(value: bool | int | str) -> Fact:
        return Fact(value=value, file=line.file, key="ms-swift's default")

    tuner = "".join((line.arguments.get("tuner_type") or line.arguments.get("train_type") or _NO_TUNER).values)
    facts = {} if tuner == "lora_llm" else {"freeze_vision": fact(True), "freeze_projector": fact(True)}
    if re.search(r"\bmegatron (sft|pt|rlhf)\b", line.command):
        facts |= {"microbatch": fact(1), "global_batch": fact(16), "recompute": fact("selective")}
    elif re.search(r"\bswift (sft|pt|rlhf)\b", line.command):
        facts |= {"recompute": fact("full")} | ({} if tuner else {"lora": fact("lora")})
    return facts


def _requested_gpu(line: CommandLine) -> dict[str, Fact]:
    """The GPU that Slurm is asked for: `--gres=gpu:a100:8`, `-C h100`, `--partition=h200`; the last that names one."""
    named = {}
    for name in ("partition", "p", "constraint", "c", "gres"):
        for argument in (*line.earlier.get(name, ()), *filter(None, [line.arguments.get(name)])):
            if argument.values and re.search(r"(?i)\b[abhvl]\d{2,3}|mi\d{3}|gb\d{3}", argument.values[0]):
                named["gpu"] = argument.fact(argument.values[0])
    return named


def looks_like_swift(head: Head) -> bool:
    """A script that runs `megatron sft` or `swift sft`, arguments or YAML that only ms-swift has."""
    said = re.search(r"\b(megatron|swift) (sft|pt|rlhf)\b|--(tuner_type|train_type|rlhf_type)\b", head.text)
    return (looks_like_script(head) and said is not None) or _SWIFT_YAML(head)


def read_swift(path: Path) -> SetUp:
    """As `read_script`, or the YAML that ms-swift takes as `--config`."""
    return read_framework("ms-swift")(path) if path.suffix.lower() in (".yaml", ".yml") else read_script(path)


def hf_set_up(path: Path) -> SetUp:
    """The model of a config.json.

    Raises:
        InputError: as `read_hf_config`.
    """
    model = read_hf_config(path)
    names = ", ".join(module.name for module in model.modules)
    return SetUp(
        kind="hf",
        files=(path,),
        facts={"model_file": Fact(value=str(path.resolve()), file=path)},
        read=(f"model of {path.name}: {names}",),
    )
