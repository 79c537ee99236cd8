"""The migration matrix of a plan: what of it each framework runs as it is, takes a plug-in for, or cannot run.

Rows are the needs of this plan, cells come from `support.yaml`, and every exporter is asked too: one that refuses a
plan or changes it makes its framework less than ready, whatever the table says.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mmplan.cost_models.build import build_graph
from mmplan.errors import CheckError, InputError
from mmplan.planner.formats.exported import Exported, Loss
from mmplan.planner.formats.needs import Need, plan_needs
from mmplan.planner.formats.support import Cell, Target, cell, readiness, targets
from mmplan.planner.plan import Plan

Exporter = Callable[[Plan], Exported]
FOUND = "what only its exporter finds"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the exporter of a framework makes of the plan; `refused` is its sentence, empty where it wrote files."""

    refused: str
    losses: tuple[Loss, ...]

    @property
    def step_more_s(self) -> float | None:
        """What a step takes longer by all losses; None where one has no price, or nothing is written."""
        prices = [loss.step_s for loss in self.losses]
        known = [price for price in prices if price is not None]
        return None if self.refused or len(known) < len(prices) else sum(known)


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A framework against the needs. `cells` in their order; None: the row is another framework's.

    `decides`: the need and the reason that keep it from running the plan as it is.
    """

    target: Target
    cells: tuple[Cell | None, ...]
    readiness: float
    decides: str
    source: str
    verdict: Verdict | None  # None: this release has no exporter for it


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    needs: tuple[Need, ...]
    columns: tuple[Column, ...]


def migration_matrix(plan: Plan, exporters: Mapping[str, Exporter]) -> Matrix:
    """The matrix of a plan.

    Args:
        exporters: by their names in `support.yaml`.

    Raises:
        CheckError: the plan's stages are not sound.
    """
    needs = plan_needs(plan, build_graph(plan.scenario))
    columns = []
    extra: list[Cell | None] = []
    for target in targets():
        cells = tuple(cell(target.id, need.name) for need in needs)
        verdict = _verdict(plan, exporters.get(target.export))
        found = _found(cells, verdict, target)
        extra.append(found)
        columns.append(_column(target, needs, cells, found, verdict))
    if not any(extra):
        return Matrix(needs=needs, columns=tuple(columns))
    row = Need(name=FOUND, sentence="beside the needs above")
    wider = [replace(column, cells=(*column.cells, found)) for column, found in zip(columns, extra, strict=True)]
    return Matrix(needs=(*needs, row), columns=tuple(wider))


def _verdict(plan: Plan, exporter: Exporter | None) -> Verdict | None:
    if exporter is None:
        return None
    try:
        return Verdict(refused="", losses=exporter(plan).losses)
    except (CheckError, InputError) as error:
        return Verdict(refused=str(error), losses=())


def _found(cells: tuple[Cell, ...], verdict: Verdict | None, target: Target) -> Cell | None:
    """What the exporter has against a plan that the table does not know."""
    if verdict is None:
        return None
    source, known = f"mmplan export --to {target.export}", {one.status for one in cells}
    if verdict.refused and "impossible" not in known:
        return Cell(status="impossible", why=verdict.refused, source=source)
    if verdict.losses and known <= {"native"}:
        return Cell(status="plug-in", why=verdict.losses[0].sentence, source=source)
    return None


def _column(
    target: Target, needs: tuple[Need, ...], cells: tuple[Cell, ...], found: Cell | None, verdict: Verdict | None
) -> Column:
    told = [(f"{need.name} ({need.sentence}): {one.why}", one) for need, one in zip(needs, cells, strict=True)]
    told += [] if found is None else [(found.why, found)]
    worst = sorted((pair for pair in told if pair[1].status != "native"), key=lambda pair: pair[1].status)
    decides, source = (worst[0][0], worst[0][1].source) if worst else ("", "")
    return Column(
        target=target,
        cells=cells,
        readiness=readiness(tuple(one for _, one in told)),
        decides=decides,
        source=source,
        verdict=verdict,
    )
