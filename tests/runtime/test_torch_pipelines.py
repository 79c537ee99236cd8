"""Chain schedules exported as CSV run in torch's pipelining runtime with the losses and gradients of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing

from mmplan.planner.schedules.families import FAMILIES
from mmplan.planner.schedules.problem import NotApplicable, ScheduleProblem, StageEdge, StageWork
from mmplan.planner.schedules.text import schedule_csv

pytestmark = pytest.mark.distributed

pipelines: Any = pytest.importorskip("torch_pipelines", reason="torch's pipelining runtime has moved")


def csv_of(name: str, places: list[int]) -> str:
    m = pipelines.M
    stages = tuple(
        StageWork(rank=place, forward_s=(1.0,) * m, input_s=(1.0,) * m, weight_s=(1.0,) * m, held=(1.0,) * m)
        for place in places
    )
    edges = tuple(StageEdge(source=s, target=s + 1) for s in range(len(places) - 1))
    problem = ScheduleProblem(stages=stages, edges=edges, microbatches=m, capacity=(float("inf"),) * pipelines.RANKS)
    schedule = FAMILIES[name](problem)  # type: ignore[index]
    assert not isinstance(schedule, NotApplicable)
    return schedule_csv(schedule)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All schedules in one start of two processes."""
    path = tmp_path_factory.mktemp("torch")
    for name, places in pipelines.PLACES.items():
        (path / f"{name}.csv").write_text(csv_of(name, places))
    multiprocessing.start_processes(
        pipelines.run_rank, args=(str(path),), nprocs=pipelines.RANKS, join=True, start_method="forkserver"
    )
    return path


@pytest.mark.parametrize("name", pipelines.PLACES)
def test_losses_and_gradients_are_those_of_one_process(name: str, folder: Path) -> None:
    places = pipelines.PLACES[name]
    losses, gradients = pipelines.one_process(len(places))
    found: dict[int, list[torch.Tensor]] = {}
    for rank in range(pipelines.RANKS):
        told, own = torch.load(folder / f"torch{rank}.pt", weights_only=False)[name]
        found |= own
        if told:
            assert told == pytest.approx(losses, rel=1e-6)
    flat = [gradient for stage in range(len(places)) for gradient in found[stage]]
    for gradient, expected in zip(flat, gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-5)
