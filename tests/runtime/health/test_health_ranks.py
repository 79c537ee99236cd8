"""Statistics of two processes are those of one that has everything."""

import socket
from typing import Any

import pytest
import torch
from case_processes import run_on_ranks
from health_rank_cases import by_name, features, halves, run_cases, step, two_layers, uneven_heads
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


@pytest.mark.parametrize("name", ["jed", "gradient_attenuation", "kv_shift"])
def test_replicas_read_what_one_process_reads_of_all_data(name: str, ranks: list[Any], whole: Any) -> None:
    own = {key: value for key, value in ranks[0]["replicated"].items() if key[0] == name and "cross" not in key[1]}
    assert own
    if name == "kv_shift":  # is of one rank's data
        return
    for key, value in own.items():
        assert value == pytest.approx(whole[0][key], rel=1e-4), key


def test_the_variance_over_replicas_is_that_over_microbatches(ranks: list[Any], whole: Any) -> None:
    key = ("gradient_variance", "gradient")
    # a microbatch's loss was halved to enter the mean, a replica's was not
    assert ranks[0]["replicated"][key] == pytest.approx(4 * whole[0][key], rel=1e-3)


def test_only_the_first_rank_writes_what_all_know(ranks: list[Any]) -> None:
    assert {monitor for monitor, _ in ranks[1]["replicated"]} == {"stale_features", "headroom"}


def test_norms_of_sharded_gradients_are_those_of_the_whole(ranks: list[Any], whole: Any) -> None:
    for rank in ranks:
        assert rank["sharded"]["norms"] == pytest.approx(whole[1], rel=1e-4)
    jed = ("jed", "vision+text")
    assert ranks[0]["sharded"]["healthy"][jed] == pytest.approx(whole[0][jed], rel=1e-4)


def test_norms_of_split_layers_are_those_of_whole_ones(ranks: list[Any]) -> None:
    model = nn.ModuleDict({"vision": two_layers(0), "text": two_layers(1)})
    sum(part(features()).square().mean() for part in model.values()).backward()  # type: ignore[union-attr]
    for name, part in model.items():
        norm = torch.stack([p.grad.norm() for p in part.parameters() if p.grad is not None]).norm()
        assert [rank["tensor_parallel"][name] for rank in ranks] == pytest.approx([float(norm)] * 2, rel=1e-4)


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


def test_shares_over_a_pipeline_are_those_of_the_whole_model(ranks: list[Any]) -> None:
    model = toy()
    with attach(model, modalities=WATCH["modalities"], interval=1) as health:
        step(model, halves()[0])
        health.step()
    for side in ("vision", "text"):
        key = ("gradient_attenuation", f"branches: {side}")
        assert ranks[0]["in_stages"][key] == pytest.approx(by_name(health)[key], rel=1e-4)
