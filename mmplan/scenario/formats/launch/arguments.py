"""The arguments of a training command, from a shell script or from a plain list of `--name value` lines."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mmplan.errors import InputError
from mmplan.scenario.document import MAX_FILE_BYTES, listed, read_text
from mmplan.scenario.formats.launch.facts import Fact, Value
from mmplan.scenario.formats.launch.shell import Script, read_shell
from mmplan.scenario.formats.launch.shell_text import Word
from mmplan.scenario.formats.reading import without_terminal_codes

MAX_VALUES = 10_000
MAX_SCRIPT_BYTES = 300_000
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
_NUMBER = re.compile(r"-\d|-\.\d")
_OPTION = re.compile(r"--?[A-Za-z][\w.\-]*")
# Files that call none of these train nothing.
_TRAINS = re.compile(
    r"pretrain|train|finetune|sft|megatron (sft|pt|rlhf)|swift (sft|pt|rlhf)|llamafactory-cli|megatron_|\.py\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """`--name value...`; without values it is a switch."""

    written: str
    values: tuple[str, ...]
    line: int
    file: Path

    def fact(self, value: Value) -> Fact:
        return Fact(value=value, file=self.file, line=self.line or None, key=self.written)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandLine:
    """All arguments of a file by name (`tensor_model_parallel_size`), and what was told while reading them.

    Attributes:
        arguments: the last one of each name.
        earlier: those that a later one overrules.
        words: words of the command that are no arguments: the launcher, the script.
        overrides: `a.b=c` words (Hydra).
        variables: of the script.
        comments: texts with their lines.
    """

    file: Path
    arguments: Mapping[str, Argument]
    earlier: Mapping[str, tuple[Argument, ...]] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    overrides: Mapping[str, Argument] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    comments: tuple[Word, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        return " ".join(self.words)


def argument_name(written: str) -> str:
    """`--num-layers` -> `num_layers`; case does not matter (`--freeze-LM`)."""
    return written.lstrip("-").replace("-", "_").lower()


def read_command_line(path: Path) -> CommandLine:
    """The arguments of the training command in a file.

    Raises:
        InputError: the file cannot be read, or holds no arguments.
    """
    text = without_terminal_codes(read_text(path, "launch script", MAX_SCRIPT_BYTES))
    if is_argument_list(text):
        words = [
            Word(word.strip("\"'"), number)
            for number, line in enumerate(text.splitlines(), 1)
            if not line.lstrip().startswith("#")
            for word in line.split()
            if word != "\\"
        ]
        comments = tuple(
            Word(line[:400], number)
            for number, line in enumerate(text.splitlines(), 1)
            if line.lstrip().startswith("#")
        )
        return _parsed(path, words, (), {}, comments, [])
    script = read_shell(text, path)
    command, others = _training_command(script, path)
    warnings = [*script.warnings]
    if others:
        first = ", ".join(f"line {line}" for line in others[:5])
        warnings.append(f"{path.name} starts other commands too ({first}): the one of line {command[0].line} is read")
    return _parsed(path, command, script.directives, script.variables, script.comments, warnings)


def is_argument_list(text: str) -> bool:
    """Whether every line is blank, a comment, or starts with an argument: a list without a command."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    return bool(lines) and all(_OPTION.match(line) or (line[0] in "\"'$" and "=" not in line) for line in lines)


def _training_command(script: Script, path: Path) -> tuple[list[Word], list[int]]:
    """The words of the command with the most arguments among those that train, and lines of others like it."""
    commands = [_unpacked(words, script.variables) for words in script.commands]
    counts = [
        (sum(bool(_OPTION.fullmatch(w.text.split("=")[0])) or "=" in w.text for w in words), words)
        for words in commands
    ]
    counts = [(count, words) for count, words in counts if words and words[0].text not in ("echo", "printf", "cat")]
    trains = [
        (count, words) for count, words in counts if count >= 2 and _TRAINS.search(" ".join(w.text for w in words))
    ]
    if not trains:
        raise InputError("no training command: no line starts a script with arguments such as --num-layers", file=path)
    most = max(count for count, _ in trains)
    chosen = next(words for count, words in trains if count == most)
    like = [words[0].line for count, words in trains if words is not chosen and 2 * count >= most]
    return chosen, like


def _unpacked(words: Sequence[Word], variables: Mapping[str, str]) -> list[Word]:
    """Words with the commands inside `bash -c "..."` and `eval "..."` opened, exported variables put in."""
    result: list[Word] = []
    for index, word in enumerate(words):
        if index and words[index - 1].text == "-c" and "$" in word.text:
            text = _VARIABLE.sub(lambda match: variables.get(match[1] or match[2], match[0])[:MAX_VALUES], word.text)
            word = Word(text[:MAX_FILE_BYTES], word.line)
        inside = re.split(r"[\s;]+", word.text) if re.search(r"\s--\w", word.text) else [word.text]
        result += [Word(part, word.line) for part in inside if part and part != "\\"]
    return result


def _parsed(
    path: Path,
    words: Iterable[Word],
    directives: Iterable[Word],
    variables: Mapping[str, str],
    comments: tuple[Word, ...],
    warnings: list[str],
) -> CommandLine:
    found: dict[str, list[Argument]] = {}
    overrides: dict[str, Argument] = {}
    plain: list[str] = []
    for source in (_in_full(directives), _in_full_of_srun(list(words))):
        _collect(path, source, found, overrides, plain)
    arguments: dict[str, Argument] = {}
    for name, several in found.items():
        arguments[name] = several[-1]
        different = [each for each in several[:-1] if each.values != several[-1].values]
        if different and several[-1].written.startswith("--"):
            first = different[0]
            told = " ".join(several[-1].values)[:60] or "(no value)"
            warnings.append(
                f"{several[-1].written} stands {len(several)} times (lines {first.line} and {several[-1].line}): "
                f"the last, {told}, is taken"
            )
    open_words = [word for word in plain if re.fullmatch(r"\$\{\w+\}", word) and len(plain) > 1]
    if open_words:
        warnings.append(f"the command takes {listed(open_words, 8)}, which no line sets: what stands there is not read")
    if not arguments and not overrides:
        raise InputError("no arguments such as --num-layers 32", file=path)
    return CommandLine(
        file=path,
        arguments=arguments,
        earlier={name: tuple(several[:-1]) for name, several in found.items() if len(several) > 1},
        words=tuple(plain),
        overrides=overrides,
        variables=dict(variables),
        comments=comments,
        warnings=tuple(warnings),
    )


def _in_full(words: Iterable[Word]) -> list[Word]:
    """Slurm's `-N 2`, `-N2` and `-n 16` as its long options: case tells them apart."""
    made = []
    for word in words:
        short = re.fullmatch(r"-([Nn])=?(\d{0,7})", word.text)
        if short is None:
            made.append(word)
            continue
        made.append(Word({"N": "--nodes", "n": "--ntasks"}[short[1]], word.line))
        made += [Word(short[2], word.line)] if short[2] else []
    return made


def _in_full_of_srun(words: list[Word]) -> list[Word]:
    """The same of srun's own options, which stand before the program that it starts."""
    if not words or words[0].text.rpartition("/")[2] not in ("srun", "salloc"):
        return words
    end = 1
    while end < len(words) and (words[end].text.startswith("-") or words[end - 1].text.startswith("-")):
        end += 1
    return [*_in_full(words[:end]), *words[end:]]


def _collect(
    path: Path,
    words: Iterable[Word],
    found: dict[str, list[Argument]],
    overrides: dict[str, Argument],
    plain: list[str],
) -> None:
    name, line = "", 0
    values: list[str] = []

    def flush() -> None:
        if name:
            found.setdefault(argument_name(name), []).append(
                Argument(written=name, values=tuple(values), line=line, file=path)
            )

    for word in words:
        text = word.text
        option, equals, value = text.partition("=")
        if _OPTION.fullmatch(option) and not _NUMBER.match(text):
            flush()
            name, values, line = option, [value] if equals else [], word.line
        elif re.fullmatch(r"\+{0,2}~?[A-Za-z_][\w]*(\.[\w]+)+=.*", text, re.DOTALL):
            flush()
            key = text.partition("=")[0].lstrip("+~")
            overrides[key] = Argument(written=key, values=(text.partition("=")[2],), line=word.line, file=path)
            name, values = "", []
        elif name and len(values) < MAX_VALUES and not text.endswith((".py", "torchrun", "python", "python3")):
            values.append(text)
        else:
            flush()
            name, values = "", []
            plain.append(text)
    flush()
