"""What launch files say of a training run, as single facts with the place where each stands.

Every reader of launch files (Megatron arguments, DeepSpeed, torchtitan, YAML of frameworks) gives a `SetUp`; files that
belong together are merged fact by fact, and one module makes a scenario of the result.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mmplan.errors import InputError
from mmplan.scenario.document import shown

Value = bool | int | float | str

MOST_DEVICES = 1_000_000
_UNRESOLVED = re.compile(r"\$\{?[A-Za-z0-9_@#?*!.]|\$\(|\?\?\?|`|<[A-Za-z_ ]+>")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One value, and the place where it stands: file, line, and the key or argument as written there."""

    value: Value
    file: Path
    line: int | None = None
    key: str = ""

    @property
    def place(self) -> str:
        """`run.sh:12 --num-layers`."""
        return f"{self.file.name}{f':{self.line}' if self.line else ''} {self.key}".rstrip()

    def error(self, message: str) -> InputError:
        return InputError(message, file=self.file, line=self.line, key=self.key or None)


@dataclass(frozen=True, kw_only=True, slots=True)
class SetUp:
    """A training run as its launch files tell it.

    Attributes:
        kind: as `mmplan import` names it.
        files: what was read, in order.
        facts: by name, see `setup_scenario.py` and `setup_model.py` for the names; what no file says is absent.
        read, ignored, warnings: sentences beside what the facts themselves say.
    """

    kind: str
    files: tuple[Path, ...]
    facts: Mapping[str, Fact] = field(default_factory=dict)
    read: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        return name in self.facts

    def count(self, name: str, *, most: int = MOST_DEVICES, least: int = 1) -> int | None:
        """A whole number, None when no file says it.

        Raises:
            InputError: a variable that no file sets, or no number within the limits.
        """
        fact = self.facts.get(name)
        if fact is None:
            return None
        value = _known(fact)
        number = _number(value)
        if number is None or number != int(number) or not least <= number <= most:
            raise fact.error(f"expected a whole number from {least:,} to {most:,}, found {shown(value)}")
        return int(number)

    def flag(self, name: str, default: bool = False) -> bool:
        """A yes or no.

        Raises:
            InputError: a variable that no file sets, or neither.
        """
        fact = self.facts.get(name)
        if fact is None:
            return default
        value = _known(fact)
        answer = truth(value)
        if answer is None:
            raise fact.error(f"expected true or false, found {shown(value)}")
        return answer

    def text(self, name: str) -> str | None:
        """A word.

        Raises:
            InputError: a variable that no file sets.
        """
        fact = self.facts.get(name)
        return None if fact is None else str(_known(fact)).strip()

    def implied_replicas(self) -> int | None:
        """global batch / (microbatch x accumulation), where files say all three and it is a whole number.

        Raises:
            InputError: as `count`.
        """
        numbers = [self.count(name, most=10_000_000) for name in ("global_batch", "microbatch", "accumulation")]
        batch, micro, steps = numbers
        if batch is None or micro is None or steps is None or batch % (micro * steps):
            return None
        return batch // (micro * steps)


def truth(value: Value) -> bool | None:
    """Yes or no of how configuration files write them; None of anything else."""
    if isinstance(value, bool):
        return value
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    return words.get(str(value).strip().lower())


def whole(value: Value) -> int | None:
    """A whole number of 0 or more as it stands, of at most 12 digits; None of anything else."""
    text = str(value)
    return int(text) if not isinstance(value, bool) and re.fullmatch(r"[0-9]{1,12}", text) else None


def is_unresolved(value: Value) -> bool:
    """Whether a text still holds a variable, a command's output or a placeholder that no file sets."""
    return isinstance(value, str) and _UNRESOLVED.search(value) is not None


def _known(fact: Fact) -> Value:
    if is_unresolved(fact.value):
        raise fact.error(f"{shown(fact.value)} is set nowhere in the file: write its value there and import it again")
    return fact.value


def _number(value: Value) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if abs(value) < 1e18 else None
    text = value.strip().replace("_", "").replace(",", "")
    if not re.fullmatch(r"[+-]?\d{1,18}(\.\d{0,18})?([eE][+-]?\d{1,2})?", text):
        return None
    return float(text)


def merged(setups: Sequence[SetUp]) -> SetUp:
    """Set-ups of files that belong together as one: what several say is the first one's, and contradictions are told.

    Raises:
        InputError: files of two runs, whose degrees or model differ.

    A file that leaves a value open (a variable, DeepSpeed's "auto") takes it from one that says it.
    """
    if len(setups) == 1:
        return setups[0]
    setups = sorted(setups, key=lambda setup: setup.kind == "hf")  # a config says nothing of the run
    facts: dict[str, Fact] = {}
    warnings: list[str] = []
    for setup in setups:
        for name, fact in setup.facts.items():
            known = facts.get(name)
            if known is None or is_unresolved(known.value):
                facts[name] = fact
            elif not is_unresolved(fact.value) and _differs(known.value, fact.value):
                if name in _OF_ONE_RUN:
                    told = f"{known.place} = {shown(known.value)}, here {shown(fact.value)}"
                    raise fact.error(f"these are two runs: {told}; import each by itself")
                warnings.append(
                    f"{known.place} = {shown(known.value)} and {fact.place} = {shown(fact.value)} contradict each "
                    "other: the first is taken"
                )
    given = any(setup.kind in ("deepspeed", "accelerate") for setup in setups)
    if given and (named := facts.pop("second_file", None)) is not None:
        name = str(named.value).replace("\\", "/").rsplit("/", 1)[-1]
        if all(file.name != name for setup in setups for file in setup.files):
            warnings.append(f"{named.place} names {shown(named.value)}, which is not among the files that are given")
    return SetUp(
        kind=setups[0].kind,
        files=tuple(file for setup in setups for file in setup.files),
        facts=facts,
        read=_all(setup.read for setup in setups),
        ignored=_all(setup.ignored for setup in setups),
        warnings=tuple(
            warning
            for warning in (*_all(setup.warnings for setup in setups), *warnings)
            if not (warning.endswith(GIVE_IT_TOO) and given)
        ),
    )


# Files that differ in one of these do not belong together.
_OF_ONE_RUN = ("tp", "pp", "cp", "ep", "layers", "hidden")
GIVE_IT_TOO = "its settings are not in this file; give it beside this one"


def _differs(one: Value, other: Value) -> bool:
    numbers = _number(one), _number(other)
    if None not in numbers:
        return numbers[0] != numbers[1]
    return str(one).lower() != str(other).lower()


def _all(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(sentence for part in parts for sentence in part))
