"""Typed reading of a config.json: the file's value of a key, else the default of the class, else one sentence."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mmplan.errors import InputError
from mmplan.scenario.document import listed, shown
from mmplan.scenario.formats.hf.class_defaults import ClassDefaults, PartDefaults, defaults_of

MAX_WIDTH = 1_000_000
MAX_LAYERS = 2_000


@dataclass(frozen=True, slots=True)
class Log:
    """What was asked of a file: keys that were read, keys that were absent with the default taken, and what a family
    leaves out."""

    read: set[str] = field(default_factory=set)
    defaulted: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fields:
    """A mapping of a config file, read as the configuration class `kind` of transformers reads it.

    An explicit null is a value of its own where the class has a default: it says "none", not "as usual".
    """

    values: Mapping[str, Any]
    kind: str
    defaults: Mapping[str, Any]
    file: Path
    path: str = ""
    log: Log = field(default_factory=Log, compare=False)

    @property
    def of_class(self) -> ClassDefaults:
        return defaults_of(self.kind)

    def get(self, *names: str) -> Any:
        """Value of the first name that stands in the file, else the first default, else None."""
        usual = [self.of_class.name_of(name) for name in names]
        given = [other for name in usual for other in (*self.of_class.aliases.get(name, ()), name)]
        for name in given:
            if name in self.values:
                self.log.read.add(self.key(name))
                return self.values[name]
        for name in usual:
            if name in self.defaults:
                if self.defaults[name] is not None:
                    self.log.defaulted[self.key(name)] = self.defaults[name]
                return self.defaults[name]
        return None

    def count(self, *names: str, least: int = 1, most: int = MAX_WIDTH) -> int:
        """A whole number from `least` to `most`; InputError when absent or something else."""
        value = self.get(*names)
        if value is None:
            raise self.missing(*names)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(names[0], f"expected a whole number from {least:,} to {most:,}, found {shown(value)}")
        return value

    def optional(self, *names: str, least: int = 1, most: int = MAX_WIDTH) -> int | None:
        """The same, or None where the key is null or nowhere."""
        return None if self.get(*names) is None else self.count(*names, least=least, most=most)

    def layers(self, *names: str) -> int:
        return self.count(*(names or ("num_hidden_layers",)), most=MAX_LAYERS)

    def side(self, name: str) -> int:
        """A side in pixels, given as a number or as two equal ones."""
        value = self.get(name)
        if isinstance(value, dict) and len(value) == 2 and set(value) <= {"height", "width"}:
            value = [value["height"], value["width"]]
        if isinstance(value, list | tuple):
            if len(value) != 2 or value[0] != value[1]:
                raise self.error(
                    name, f"expected a number or two equal ones, found {shown(list(value))}: {value!r:.40}"
                )
            return replace(self, values={**self.values, name: value[0]}).count(name)
        return self.count(name)

    def flag(self, name: str) -> bool:
        """True or false; absent and null mean false."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, f"expected true or false, found {shown(value)}")
        return bool(value)

    def ratio(self, name: str) -> float:
        """A number above 0 and at most 1,000."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1000:
            raise self.error(name, f"expected a number above 0, found {shown(value)}")
        return float(value)

    def indices(self, name: str, count: int) -> tuple[int, ...]:
        """0-based layer indices below `count`, sorted; larger ones do nothing in the model and are dropped."""
        value = self.get(name)
        if not isinstance(value, list | tuple) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
            raise self.error(name, f"expected a list of layer indices, found {shown(value)}")
        return tuple(sorted({index for index in value if 0 <= index < count}))

    def numbers(self, *names: str, count: int | None = None, most: int = MAX_WIDTH) -> tuple[int, ...]:
        """Whole numbers from 1 to `most`, `count` of them or from one to MAX_LAYERS."""
        value = self.get(*names)
        if value is None:
            raise self.missing(*names)
        good = isinstance(value, list | tuple) and 0 < len(value) <= MAX_LAYERS and count in (None, len(value))
        if not good or any(isinstance(one, bool) or not isinstance(one, int) or not 0 < one <= most for one in value):
            many = "a list of" if count is None else str(count)
            raise self.error(names[0], f"expected {many} whole numbers from 1 to {most:,}, found {value!r:.60}")
        return tuple(value)

    def stages(self, name: str, *, count: int | None = None, most: int = MAX_LAYERS) -> tuple[int, ...]:
        """Numbers of up to 16 stages, each of which may be twice as wide as the one before."""
        found = self.numbers(name, count=count, most=most)
        if len(found) > 16:
            raise self.error(name, f"expected at most 16 stages, found {len(found)}")
        return found

    def words(self, name: str, count: int) -> list[str] | None:
        """One word for each of `count` layers, or None where the key is null or nowhere."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.error(name, f"expected a list of {count} names, found {shown(value)}")
        if len(value) != count:
            raise self.error(name, f"expected {count} names, one for each layer, found {len(value)}")
        return value

    def word(self, name: str, known: Mapping[str, Any] | tuple[str, ...]) -> str:
        """One of the known words."""
        value = self.get(name)
        if not isinstance(value, str) or value not in known:
            raise self.error(name, f"expected {listed(known, 20)}, found {shown(value)}")
        return value

    def refuse_unless(self, name: str, *allowed: Any, why: str) -> None:
        """InputError where the key has a value that changes the model in a way that is not read."""
        value = self.get(name)
        if not any(value is other or (value == other and type(value) is type(other)) for other in allowed):
            raise self.error(name, f"{shown(value)} is not supported: {why}")

    def same(self, name: str, wanted: int, what: str) -> None:
        """InputError where a width is not that of what it meets."""
        if self.count(name) != wanted:
            raise self.error(name, f"expected {what} {wanted:,}, found {self.count(name):,}")

    def has(self, name: str) -> bool:
        """Whether the file has a value for the key."""
        return self.values.get(name) is not None

    def part(self, *names: str, kind: str | None = None, flat: bool = False) -> "Fields":
        """The nested config of the first name that is there, as its class reads it.

        Args:
            kind: class of a nested config that names none; default: what the outer class takes.
            flat: keys may stand beside it instead (files of before 2025).
        """
        name = next((other for other in names if self.values.get(other) is not None), names[0])
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, f"expected a mapping, found {shown(value)}")
        known = self.of_class.parts.get(names[0], PartDefaults(kind=kind or "", absent={}))
        usual = kind or known.kind
        self.log.read.add(self.key(name))
        if value is None and not flat and name == "text_config" and "num_hidden_layers" in self._unowned():
            message = "sizes of the language model stand at the top, where the class of transformers does not read them"
            raise self.error(name, f"{message}: put them under text_config")
        if value is None and flat:
            defaults = {**defaults_of(usual).keys, **known.absent}
            values = {key: own for key, own in self.values.items() if key not in ("model_type", *self.of_class.parts)}
            return replace(self, values=values, kind=usual, defaults=defaults)
        if value is None:
            absent = known.absent if usual == known.kind else {}
            defaults = {**defaults_of(usual).keys, **absent}
            return replace(self, values={}, kind=usual, defaults=defaults, path=self.key(name))
        found = value.get("model_type")
        inner = found if isinstance(found, str) and found and not (known.fixed and kind is None) else usual
        self.log.read.add(f"{self.key(name)}.model_type")
        merged = known.absent if known.merged and inner == known.kind else {}
        return replace(
            self, values=value, kind=inner, defaults={**defaults_of(inner).keys, **merged}, path=self.key(name)
        )

    def _unowned(self) -> set[str]:
        """Keys of the file that its class does not know."""
        return set(self.values) - set(self.defaults) if self.defaults else set()

    def read_as(self, kind: str) -> "Fields":
        """The same keys as another class reads them."""
        return replace(self, kind=kind, defaults=defaults_of(kind).keys)

    def read_as_stack(self, kind: str) -> "Fields":
        """The same keys and defaults, with the structure of another class."""
        return replace(self, kind=kind)

    def missing(self, *names: str) -> InputError:
        if any(name in self.values for name in names):
            return self.error(names[0], "expected a number, found nothing (null)")
        return self.error(names[0], f"this key is missing; found {listed(self.values, 8) or 'no keys'}")

    def error(self, name: str, message: str) -> InputError:
        return InputError(message, file=self.file, key=self.key(name))

    def key(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name
