"""Numbers fitted to measured steps, with their errors: `fitted.yaml`, written by benchmarks/fit_parameters.py.

They replace the starting values of `hardware.yaml` and `stacks.yaml`. Names: `generation.NAME.FIELD`,
`generation.NAME.attention.KIND`, `link.node.fraction`, `link.network.fraction`, `stack.NAME.FIELD`.
"""

from dataclasses import dataclass
from functools import cache
from importlib import resources

import yaml


@dataclass(frozen=True, slots=True)
class Fitted:
    """A fitted number, its relative standard error, and the rows that it acts on."""

    value: float
    relative_error: float
    rows: int

    @property
    def source(self) -> str:
        return f"fit: benchmarks/fit_parameters.py, {self.rows} rows, +-{100 * self.relative_error:.0f} %"


@cache
def fitted_numbers() -> dict[str, Fitted]:
    """All fitted numbers by name."""
    text = resources.files("mmplan.scenario").joinpath("fitted.yaml").read_text(encoding="utf-8")
    content: dict[str, list[float]] = yaml.safe_load(text) or {}
    return {name: Fitted(value, error, round(rows)) for name, (value, error, rows) in content.items()}


def fitted_below(prefix: str) -> dict[str, float]:
    """Values whose names start with `prefix.`, by the rest of the name."""
    start = prefix + "."
    return {name.removeprefix(start): n.value for name, n in fitted_numbers().items() if name.startswith(start)}
