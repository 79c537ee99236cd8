"""Statistics of two processes are those of one that has everything."""

import socket
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from case_processes import run_on_ranks
from health_rank_cases import (
    STAGED,
    by_name,
    features,
    halves,
    robustness_of_halves,
    run_cases,
    step,
    two_layers,
    uneven_heads,
)
from health_toys import WATCH, toy
from torch import nn

from mmplan.runtime.health.hooks import attach
from mmplan.runtime.health.statistics import gradient_norms

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        (folder / "port").write_text(str(free.getsockname()[1]))
    return run_on_ranks(run_cases, 2, folder)


@pytest.fixture(scope="module")
def whole() -> tuple[dict[tuple[str, str], float], dict[str, float]]:
    """One process takes both halves as microbatches; readings and norms of its gradient."""
    model = toy()
    with attach(model, **WATCH, interval=1) as health:
        for part in halves():
            step(model, part, 0.5)
        norms = gradient_norms(model, health._settings)
        health.step()
    return by_name(health), norms


STATISTICS = {
    "jed",
    "attention_collapse",
    "gradient_attenuation",
    "shared_conflict",
    "gradient_variance",
    "kv_shift",
}


def compared(ranks: Mapping[Any, float], alone: Mapping[Any, float]) -> dict[str, float]:
    """The largest relative difference by monitor; the readings are of the same things."""
    far: dict[str, float] = {}
    ours, theirs = ({key: v for key, v in found.items() if key[0] in STATISTICS} for found in (ranks, alone))
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        far[key[0]] = max(far.get(key[0], 0.0), abs(value - theirs[key]) / abs(theirs[key]))
    assert far.keys() == STATISTICS
    return far


@pytest.mark.parametrize("way", ["replicated", "sharded"])
def test_every_monitor_reads_on_replicas_what_one_process_reads_of_all_data(
    way: str, ranks: list[Any], whole: Any
) -> None:
    """DDP and FSDP2. A microbatch's loss was halved to enter the mean, a replica's was not: V is 4 times as large."""
    found = ranks[0][way]["healthy"] if way == "sharded" else ranks[0][way]
    alone = {key: value * (4 if key[0] == "gradient_variance" else 1) for key, value in whole[0].items()}
    assert max(compared(found, alone).values()) < 2e-3
    assert found["robustness", "vision"] == pytest.approx(robustness_of_halves(), rel=1e-3)


def test_every_monitor_reads_under_tensor_parallelism_what_one_process_reads(ranks: list[Any], whole: Any) -> None:
    found = ranks[0]["tensor_parallel"]["readings"]
    assert max(compared(found, whole[0]).values()) < 2e-3
    assert found["robustness", "vision"] == pytest.approx(whole[0]["robustness", "vision"], rel=1e-3)
    assert ranks[1]["tensor_parallel"]["norms"] == pytest.approx(whole[1], rel=1e-4)
    assert not {m for m, _ in ranks[1]["tensor_parallel"]["readings"]} & STATISTICS


def test_every_monitor_reads_in_stages_of_a_pipeline_what_one_process_reads(ranks: list[Any]) -> None:
    """But robustness, which needs the whole way from an image to the text output."""
    model = toy()
    with attach(model, **STAGED) as health:
        for part in halves():
            step(model, part, 0.5)
        health.step()
    names = {
        "toy.cross: key": "cross: key",
        "toy.cross": "cross",
        "toy.image_embedding.weight": "image_embedding.weight",
    }
    found = {(m, names.get(of, of)): v for rank in ranks for (m, of), v in rank["in_stages"].items()}
    alone = {key: value for key, value in by_name(health).items() if key != ("gradient_attenuation", "cross: key")}
    found = {key: value for key, value in found.items() if key != ("gradient_attenuation", "cross: key")}
    assert max(compared(found, alone).values()) < 2e-3
    assert ("robustness", "vision") not in found


def test_only_the_first_rank_writes_what_all_know(ranks: list[Any]) -> None:
    assert {monitor for monitor, _ in ranks[1]["replicated"]} == {"stale_features", "headroom"}


def test_norms_of_sharded_gradients_are_those_of_the_whole(ranks: list[Any], whole: Any) -> None:
    for rank in ranks:
        assert rank["sharded"]["norms"] == pytest.approx(whole[1], rel=1e-4)


def test_norms_of_split_layers_are_those_of_whole_ones(ranks: list[Any]) -> None:
    model = nn.ModuleDict({"vision": two_layers(0), "text": two_layers(1)})
    sum(part(features()).square().mean() for part in model.values()).backward()  # type: ignore[union-attr]
    for name, part in model.items():
        norm = torch.stack([p.grad.norm() for p in part.parameters() if p.grad is not None]).norm()
        found = [rank["tensor_parallel"]["layers"][name] for rank in ranks]
        assert found == pytest.approx([float(norm)] * 2, rel=1e-4)


def test_an_overflow_on_one_rank_is_followed_by_all_without_a_hang(ranks: list[Any]) -> None:
    (found,) = [(of, detail) for monitor, of, detail in ranks[1]["sharded"]["overflow"] if monitor == "overflow"]
    assert (found[0], found[1]["modality"], found[1]["because"]) == ("vision.block", "vision", "forward")
    assert ("overflow", "vision.block") not in [(m, of) for m, of, _ in ranks[0]["sharded"]["overflow"]]


def test_aligned_statistics_of_sharded_heads_are_those_of_all_heads(ranks: list[Any]) -> None:
    cross = uneven_heads()

    class Keys(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k_proj = cross.k_proj

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.k_proj(x).square().mean()

    model = Keys()
    with attach(model, modalities={}, keys={"vision": "k_proj"}, head_shards=2, interval=1) as health:
        model(features()).backward()
        health.step()
    key = ("kv_shift", "vision")
    assert ranks[0]["by_heads"][key] == pytest.approx(by_name(health)[key], rel=1e-9)
    assert by_name(health)[key] > 0.25
