"""YAML of training frameworks: their keys are renamed to the arguments that say the same, and read as those.

Values of other keys (`${model.seq}`), as OmegaConf writes them, are put in, and so are products and quotients of whole
numbers (`${multiply:4, ${.hidden}}`), which NeMo's launcher knows; the environment and `???` stay open. Files that a
key names are not opened.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmplan.errors import InputError
from mmplan.scenario.document import Document, KeyPath, dotted, read_document, read_text, shown
from mmplan.scenario.formats.launch.arguments import Argument, CommandLine
from mmplan.scenario.formats.launch.comments import hinted_devices
from mmplan.scenario.formats.launch.facts import Fact, SetUp, is_unresolved, whole
from mmplan.scenario.formats.launch.framework_keys import REFUSED_RECIPES, RENAMED, TRANSLATED, Translation
from mmplan.scenario.formats.launch.megatron import NEEDED_ARGUMENTS, megatron_set_up
from mmplan.scenario.formats.launch.shell_text import Word
from mmplan.scenario.formats.reading import Head

MAX_STEPS = 10
_REPLICAS = ("dp_shard_size", "dp_replicate_size")
# NeMo-Megatron-Launcher, launcher_scripts/main.py: its resolvers, of two numbers
_RESOLVERS: Mapping[str, Callable[[int, int], int]] = {
    "multiply": lambda one, other: one * other,
    "divide_ceil": lambda one, other: -(-one // other),
    "divide_floor": lambda one, other: one // other,
}
_RESOLVER = re.compile(rf"\$\{{({'|'.join(_RESOLVERS)}):\s*([^,]{{1,200}}),\s*([^,]{{1,200}})\}}")
_REFERENCE = re.compile(r"\$\{([A-Za-z_.][\w.]*)\}")


def looks_like_framework(kind: str) -> Callable[[Head], bool]:
    """Whether the head of a file has the keys by which a framework's YAML is known."""
    marks = _MARKS[kind]

    def looks(head: Head) -> bool:
        if head.path.suffix.lower() not in (".yaml", ".yml") or head.text.lstrip().startswith("{"):
            return False
        return any(all(re.search(rf"(?m)(?:^|[\s{{,])(?:{key})\s*:", head.text) for key in row) for row in marks)

    return looks


# One row of keys must stand, at any depth.
_MARKS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "automodel": (("_target_|recipe", "step_scheduler|recipe_args|dist_env"),),
    "veomni": (
        ("model_path", "max_seq_len", "micro_batch_size"),
        ("ulysses_size|ulysses_parallel_size", "model_path|config_path"),
    ),
    "llama-factory": (("model_name_or_path", "finetuning_type|cutoff_len|template"), ("finetuning_type", "stage")),
    "ms-swift": (
        ("tuner_type|train_type|rlhf_type",),
        ("model", "torch_dtype", "max_length", "dataset"),
        ("model", "tensor_model_parallel_size|pipeline_model_parallel_size", "max_length|dataset|freeze_vit|template"),
    ),
    "accelerate": (("distributed_type", "num_processes|num_machines"),),
    "axolotl": (("base_model", "sequence_len|micro_batch_size"),),
    "nemo": (
        ("trainer", "model", "tensor_model_parallel_size|micro_batch_size"),
        ("trainer", "num_nodes", "devices"),
        (r"model(?=\s*:\s*(?:\{|(?:#[^\n]*)?\n))", "tensor_model_parallel_size|pipeline_model_parallel_size"),
    ),
}
FRAMEWORKS = tuple(_MARKS)


def read_framework(kind: str) -> Callable[[Path], SetUp]:
    """The reader of one framework's YAML."""

    def read(path: Path) -> SetUp:
        """What the file says.

        Raises:
            InputError: not YAML, a run that does not train a model by itself, or nothing that a scenario needs.
        """
        document = read_document(path)
        _refuse_recipes(document)
        arguments, open_keys = _arguments(document, kind)
        if not arguments:
            raise InputError(f"no keys of {kind}", file=path)
        comments = [
            Word(line.strip(), number) for number, line in enumerate(read_text(path).splitlines(), 1) if "#" in line
        ]
        told = {name: argument for name, argument in arguments.items() if name not in _REPLICAS}
        line = CommandLine(file=path, arguments=told, comments=tuple(comments), warnings=open_keys)
        setup = megatron_set_up(line, kind)
        stage = arguments.get("stage")
        if kind == "llama-factory" and stage is not None and stage.values[0].lower() not in ("sft", "pt"):
            why = f"stage {stage.values[0]}: rollouts and passes of other models are not priced"
            setup = replace(setup, warnings=(*setup.warnings, why))
        facts = _with_defaults(kind, setup, arguments)
        hints = hinted_devices((Word(word.text.partition("#")[2], word.line) for word in comments), path)
        return SetUp(
            kind=kind,
            files=(path,),
            facts=hints | facts,
            read=setup.read,
            ignored=setup.ignored,
            warnings=setup.warnings,
        )

    return read


def _with_defaults(kind: str, setup: SetUp, arguments: Mapping[str, Argument]) -> dict[str, Fact]:
    """The facts, with what a framework does unless its file says otherwise."""
    facts = dict(setup.facts)
    if kind in ("accelerate", "axolotl"):
        _accelerate_replicas(facts, arguments)
    if kind == "automodel" and "stack" in facts:  # torch's FSDP2 and DTensor, no Megatron (nemo_automodel/distributed)
        facts["stack"] = replace(facts["stack"], value="torch-2025")
    if kind == "nemo" and "lora" in facts:
        facts.pop("freeze_llm", None)  # NeMo trains adapters on the frozen model
    if kind == "llama-factory" and (tuner := arguments.get("finetuning_type")) is not None:
        # src/llamafactory/hparams/finetuning_args.py: freeze_vision_tower and freeze_multi_modal_projector are true
        for name in ("freeze_vision", "freeze_projector"):
            facts.setdefault(name, tuner.fact(True))
    swift = next((found for name in ("tuner_type", "train_type", "model") if (found := arguments.get(name))), None)
    if kind == "ms-swift" and swift is not None and swift.values != ("lora_llm",):  # as in its scripts
        for name in ("freeze_vision", "freeze_projector"):
            facts.setdefault(name, swift.fact(True))
    if kind == "ms-swift" and swift is not None:
        # its command-line parameters: gradient_checkpointing is true, under Megatron recompute_granularity selective
        in_megatron = arguments.keys() & {
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "micro_batch_size",
        }
        facts.setdefault("recompute", swift.fact("selective" if in_megatron else "full"))
    if kind == "llama-factory" and (model := arguments.get("model_name_or_path")) is not None:
        # same file: finetuning_type is lora; data_args.py: cutoff_len 2048; transformers' TrainingArguments: 8 samples
        facts.setdefault("sequence", model.fact(2048))
        facts.setdefault("microbatch", model.fact(8))
        facts.setdefault("recompute", model.fact("full"))  # model_args.py: disable_gradient_checkpointing is false
        if "finetuning_type" not in arguments:
            facts.setdefault("lora", model.fact("lora"))
    if kind == "veomni" and (model := arguments.get("model")) is not None:
        facts.setdefault("precision", model.fact("bf16"))  # veomni/arguments: enable_mixed_precision is true
        facts.setdefault("recompute", model.fact("full"))  # enable_gradient_checkpointing is true
    return facts


def _accelerate_replicas(facts: dict[str, Fact], arguments: Mapping[str, Argument]) -> None:
    """Of `parallelism_config`, whose product has to be the number of processes (accelerate/parallelism_config.py).

    Raises:
        InputError: it is not, or a size is no whole number.
    """
    sizes = {name: arguments.get(f"dp_{name}_size") for name in ("shard", "replicate")}  # of _REPLICAS
    counts: dict[str, int] = {}
    for name, found in sizes.items():
        if found is not None:
            count = whole(found.values[0])
            if not count:
                message = f"expected a whole number from 1 on, found {shown(found.values[0])}"
                raise found.fact(found.values[0]).error(message)
            counts[name] = count
    if not counts:
        return
    place = next(found for found in sizes.values() if found is not None)
    facts["dp"] = place.fact(math.prod(counts.values()))
    widths = {name: whole(facts[name].value) or 1 for name in ("tp", "cp") if name in facts}
    product = math.prod([*counts.values(), *widths.values()])
    world = whole(facts["world"].value) if "world" in facts else None
    if world is not None and world != product:
        terms = [*(f"dp_{name} {count}" for name, count in counts.items()), *(f"{n} {w}" for n, w in widths.items())]
        raise facts["world"].error(f"{' x '.join(terms)} = {product} processes, the file starts {world}")


def _refuse_recipes(document: Document) -> None:
    recipe = document.values.get("recipe")
    name = recipe.get("_target_", "") if isinstance(recipe, dict) else recipe
    for pattern, why in REFUSED_RECIPES:
        if isinstance(name, str) and re.search(pattern, name, re.IGNORECASE):
            raise document.error(("recipe",), f"{name} {why}: such runs are not modelled")
    for key, why in (("infer_backend", "an inference file"), ("export_dir", "a file that exports weights")):
        if key in document.values:
            raise document.error((key,), f"{why}: no training is described")


def _arguments(document: Document, kind: str) -> tuple[dict[str, Argument], tuple[str, ...]]:
    """Arguments by name, of the shallowest key for each; and of keys with an open value what is told."""
    arguments: dict[str, Argument] = {}
    told: list[str] = []
    leaves = sorted(_leaves(document.values, ()), key=lambda leaf: len(leaf[0]))
    for path, raw in leaves:
        value = _resolved(raw, path, document.values)
        for name, text in _translated(kind, path, value):
            if name in arguments or text is None:
                continue
            if is_unresolved(text) and name not in NEEDED_ARGUMENTS:
                told.append(f"{dotted(path)} = {text[:80]} is set by another file")
                continue
            line = document.lines.get(path, 1)
            arguments[name] = Argument(written=dotted(path), values=(text,), line=line, file=document.file)
    needed = tuple(dict.fromkeys(told))
    return arguments, needed


def overriding(kind: str, overrides: Mapping[str, Argument]) -> dict[str, Argument]:
    """Arguments of `model.micro_batch_size=2` words on a command line (Hydra)."""
    arguments: dict[str, Argument] = {}
    for key, override in overrides.items():
        text = override.values[0].strip("\"'")
        value: Any = {"true": True, "false": False, "null": None}.get(text.lower(), text)
        for name, said in _translated(kind, tuple(key.split(".")), value):
            if said is not None:
                arguments[name] = Argument(written=key, values=(said,), line=override.line, file=override.file)
    return arguments


def _leaves(values: Any, path: KeyPath) -> list[tuple[KeyPath, Any]]:
    if isinstance(values, dict):
        return [leaf for key, value in values.items() for leaf in _leaves(value, (*path, str(key)))]
    return [(path, values)]


def _translated(kind: str, path: KeyPath, value: Any) -> list[tuple[str, str | None]]:
    """(argument, value) pairs that a key says; usually one, with the key's own last part as name."""
    key = ".".join(str(part) for part in path)
    for pattern, translate in TRANSLATED.get(kind, ()):
        if re.fullmatch(pattern, key):
            translation: Translation = translate
            return [] if value is None else translation(value)
    if value is None or (kind == "automodel" and value == "none"):  # its loader reads the word so
        return []
    name = RENAMED.get(kind, {}).get(key)
    if name is None:
        prefixes = _PLAIN_SECTIONS.get(kind, ("",))
        section, _, leaf = key.rpartition(".")
        if section not in prefixes:
            return []
        name = leaf
    return [(name.lower(), _word(value))]


# Sections whose keys are arguments by their last part.
_PLAIN_SECTIONS: Mapping[str, tuple[str, ...]] = {
    "nemo": (
        "model",
        "train",
        "ddp",
        "data",
        "dataset",
        "trainer.strategy",
        "model.config",
        "mixed_precision",
        "model.language_model",
    ),
    "automodel": ("",),
    "veomni": ("train",),
}


def _word(value: Any) -> str | None:
    if isinstance(value, list):
        return (
            " ".join(str(item)[:200] for item in value[:100])
            if all(not isinstance(i, dict | list) for i in value)
            else None
        )
    return str(value)


def _resolved(value: Any, path: KeyPath, values: Any) -> Any:
    """A value with references to other keys put in; what cannot be found stays."""
    followed = _followed(value, path, values)
    match = _RESOLVER.fullmatch(followed.strip()) if isinstance(followed, str) else None
    if match is None:
        return followed
    one, other = (whole(_followed(word, path, values)) for word in match.groups()[1:])
    return _RESOLVERS[match[1]](one, other) if one and other else followed


def _followed(value: Any, path: KeyPath, values: Any) -> Any:
    for _ in range(MAX_STEPS):
        match = _REFERENCE.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            return value
        found = _lookup(match[1], path, values)
        if found is None:
            return value
        value = found
    return value


def _lookup(reference: str, path: KeyPath, values: Any) -> Any:
    """OmegaConf's absolute `a.b` or relative `.b`; the launcher's root (`training.`, `peft.`) is this file."""
    dots = len(reference) - len(reference.lstrip("."))
    parts = reference.strip(".").split(".")
    bases: list[list[str]] = [[str(part) for part in path[: len(path) - dots]]] if dots else [[]]
    tries = [[*base, *parts] for base in bases] + ([parts[1:]] if not dots and len(parts) > 1 else [])
    for keys in tries:
        found = values
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        if found is not None and not isinstance(found, dict | list):
            return found
    return None
