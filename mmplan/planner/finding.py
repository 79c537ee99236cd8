"""What a check found wrong."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """`rule` is a short fixed name such as `memory`; `message` is one sentence with the arithmetic."""

    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"
