"""Typed reading of a config.json: first of several key names, else the default of the class, else one sentence."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmplan.errors import InputError
from mmplan.scenario.document import listed, shown

MAX_WIDTH = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Fields:
    """A mapping of a config file. `defaults` are what the configuration class assumes for keys that are absent."""

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    file: Path
    path: str = ""

    def get(self, *names: str) -> Any:
        """Value of the first name that is present and not null, else the first default, else None."""
        for source in (self.values, self.defaults):
            for name in names:
                if source.get(name) is not None:
                    return source[name]
        return None

    def count(self, *names: str, most: int = MAX_WIDTH) -> int:
        """A whole number from 1 to `most`; InputError when absent or something else."""
        value = self.get(*names)
        if value is None:
            raise self.error(names[0], f"this key is missing; found {listed(self.values, 8) or 'no keys'}")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.error(names[0], f"expected a whole number from 1 to {most:,}, found {shown(value)}")
        return value

    def flag(self, name: str) -> bool:
        """True or false; absent means false."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, f"expected true or false, found {shown(value)}")
        return bool(value)

    def indices(self, name: str, count: int) -> tuple[int, ...]:
        """0-based layer indices below `count`, sorted; larger ones do nothing in the model and are dropped."""
        value = self.get(name)
        if not isinstance(value, list | tuple) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
            raise self.error(name, f"expected a list of layer indices, found {shown(value)}")
        return tuple(sorted({index for index in value if 0 <= index < count}))

    def inner(self, name: str, defaults: Mapping[str, Any], *, flat: bool = False) -> "Fields":
        """The nested config `name`; `flat`: its keys may stand beside it instead (files of before 2025)."""
        value = self.values.get(name)
        if value is None and flat:
            return Fields(values=self.values, defaults=defaults, file=self.file, path=self.path)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, f"expected a mapping, found {shown(value)}")
        return Fields(values=value or {}, defaults=defaults, file=self.file, path=self._key(name))

    def error(self, name: str, message: str) -> InputError:
        return InputError(message, file=self.file, key=self._key(name))

    def _key(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name
