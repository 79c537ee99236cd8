"""Sentences that gather while a scenario is made of launch files."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Told:
    """As in a `Reading`; `missing` is what a scenario needs and no file gives."""

    read: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
