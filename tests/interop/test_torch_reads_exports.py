"""torch's DeviceMesh and pipelining runtime read what is exported, on process groups that do not communicate."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from random_plans import random_plan

from mmplan.errors import CheckError
from mmplan.planner.formats.torch_pipelining import export_torch_pipelining
from mmplan.planner.plan import Plan

pytestmark = pytest.mark.interop


def exportable(count: int) -> Iterator[tuple[Plan, dict[str, Any], str]]:
    for seed in range(count):
        try:
            plan = random_plan(seed)
            files = export_torch_pipelining(plan).files
        except CheckError:
            continue
        yield plan, json.loads(files["device_mesh.json"]), files["orders.csv"]


def world(rank: int, size: int) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())


def loaded(csv: str, document: dict[str, Any], folder: Path) -> Any:
    """torch's runtime with the orders, as the process of pipeline rank 0 builds it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    ranks = document["mesh_shape"][0]
    world(0, ranks)
    places = [stage["pp"] for stage in document["stages"]]
    own = [stage for stage, place in enumerate(places) if place == 0]
    stages = [
        PipelineStage(torch.nn.Identity(), stage, len(places), torch.device("cpu"), group=dist.group.WORLD)
        for stage in own
    ]
    runtime = _PipelineScheduleRuntime(stages, document["n_microbatches"], loss_fn=lambda *_: torch.zeros(()))
    file = folder / "orders.csv"
    file.write_text(csv)
    runtime._load_csv(str(file), "compute_only")
    return runtime


def test_torch_reads_the_orders_and_the_mesh(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    cases = list(exportable(request.config.getoption("--round-trips")))
    assert len(cases) >= 5
    for plan, document, csv in cases:
        world(plan.rank_count - 1, plan.rank_count)
        mesh = init_device_mesh("cpu", tuple(document["mesh_shape"]), mesh_dim_names=tuple(document["mesh_dim_names"]))
        for stage in range(len(document["stages"])):
            row = document["stages"][stage]["pp"]
            assert mesh.mesh[row].flatten().tolist() == list(plan.stage_ranks(stage))
        if len(document["stages"]) > 1 and document["mesh_shape"][0] > 1:
            runtime = loaded(csv, document, tmp_path)
            assert sorted(runtime.pipeline_order_with_comms) == list(range(document["mesh_shape"][0]))


def pipelined() -> tuple[Plan, dict[str, Any], str]:
    cases = exportable(60)
    return next(one for one in cases if one[0].pp > 2 and one[0].microbatches > 1 and not one[0].placement)


def swapped(csv: str, one: str, other: str) -> str:
    return csv.replace(one, "@").replace(other, one).replace("@", other)


@pytest.mark.parametrize("wrong", ["0F0,", "1B0"])
def test_orders_that_lack_an_action_are_refused_by_torch(wrong: str, tmp_path: Path) -> None:
    _, document, csv = pipelined()
    assert wrong in csv
    with pytest.raises(Exception):  # noqa: B017 - torch raises AssertionError, RuntimeError, ValueError or KeyError
        loaded(csv.replace(wrong, "" if wrong.endswith(",") else "1B99", 1), document, tmp_path)


def test_a_backward_before_its_forward_is_refused_by_torch(tmp_path: Path) -> None:
    _, document, csv = pipelined()
    with pytest.raises(Exception):  # noqa: B017
        loaded(swapped(csv, "0F0", "0B0"), document, tmp_path)
