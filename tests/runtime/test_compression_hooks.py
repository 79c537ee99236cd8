"""Compressed gradients under DDP and FSDP: nothing is lost for good, ranks agree, a resumed run goes on to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from case_processes import run_on_ranks
from compression_cases import HOOKS, PROCESSES, TOWERS, TwoTowers, run_compression_cases

from mmplan.cost_models.compressed_bytes import TOP_K_FP8, TOP_K_SIGN
from mmplan.runtime.compression.low_rank import fused_matrices

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_on_ranks(run_compression_cases, PROCESSES, Path(tmp_path_factory.mktemp("compression")))


@pytest.mark.distributed
def test_all_ranks_have_the_same_bits(results: Results) -> None:
    for result in results:
        assert result["alike"] == dict.fromkeys(HOOKS, True)


@pytest.mark.distributed
def test_what_was_said_and_what_is_kept_are_all_gradients(results: Results) -> None:
    """Sum over steps of the averaged gradients + mean of what ranks keep = sum of the true means."""
    for result in results:
        for kind, error in result["telescopes"].items():
            assert error < 1e-5, kind


@pytest.mark.distributed
def test_a_resumed_run_goes_on_to_the_bit(results: Results) -> None:
    for result in results:
        assert [kind for kind, exact in result["resumes"].items() if not exact] == []


@pytest.mark.distributed
def test_every_hook_gives_the_mean_when_all_is_sent(results: Results) -> None:
    for result in results:
        for kind, error in result["fp8"].items():
            assert error < 0.04, kind  # e4m3 rounds to 1/16 at most, 2.6 % in the mean square


@pytest.mark.distributed
def test_overflow_reaches_all_ranks_and_leaves_the_state_as_it_was(results: Results) -> None:
    for result in results:
        for kind, (seen, finite, next_is_finite, kept) in result["overflow"].items():
            assert seen and finite and next_is_finite, kind
            assert kept is not False, kind


@pytest.mark.distributed
def test_counted_bytes_are_those_of_the_formats_and_of_the_sockets(results: Results) -> None:
    sizes = [p.numel() for p in TwoTowers(640).parameters()]
    shapes = {name: p.shape for name, p in TwoTowers(640).named_parameters()}
    parts = [-(-size // 2) for size in sizes]
    thin = sum(group.wire_elements(4) for group in fused_matrices(shapes, TOWERS, 4))
    vectors = sum(p.numel() for p in TwoTowers(640).parameters() if p.dim() < 2)
    expected = {
        "top k": sum(map(TOP_K_SIGN.wire_bytes, sizes)),
        # reduce-scatter of everything and all-gather of a half inside, messages about a half across
        "two levels": 4 * 2 * sum(parts) + 4 * sum(parts) + sum(map(TOP_K_FP8.wire_bytes, parts)),
        "low rank": 4 * (thin + vectors),
    }
    for result in results:
        for kind, (payload_bytes, sent_bytes, measured_bytes) in result["bytes"].items():
            assert payload_bytes == expected[kind], kind
            # gloo scatters a sum by summing all of it everywhere: on two ranks a half of the payload more
            more = PROCESSES * 4 * sum(parts) if kind == "two levels" else 0
            assert sent_bytes + more <= measured_bytes <= 1.02 * (sent_bytes + more) + 20_000, kind


@pytest.mark.distributed
def test_what_does_not_fit_is_refused_in_one_sentence(results: Results) -> None:
    for result in results:
        assert result["refusals"] == {
            "form": "the state was saved with form = {'values': 'sign4', 'fraction': 0.05, 'block': 256}, "
            "and here it is {'values': 'fp8', 'fraction': 0.2, 'block': 128}",
            "ranks": "the state was saved with ranks = 4, and here it is 2",
            "low rank": "the state was saved with rank = 4, and here it is 2",
            "tower": "no name of 10 parameters begins with 'audio.' of tower 'audio'",
            "rank": "rank 0 of a low-rank basis; expected 1 or more",
            "hsdp": "'the model' is sharded over a mesh of 2 axes: there torch itself sums dense over the first one "
            "before it calls the hook, and lets nothing take the place of that sum; call fully_shard with the mesh of "
            "the node's ranks alone",
            "hybrid": "FSDP1's register_comm_hook takes no hook for HYBRID_SHARD, whose sums inside and across nodes "
            "are its own: use fully_shard over the node's ranks with compress_across, or DDP with two_level_hook",
            "unsharded": "no part of the model is sharded; call fully_shard before",
            "operation": "'llm' asks for RedOpType.MAX, and messages are summed or averaged",
            "model": "10 of 10 parameters are not of the model that the state was made for",
        }


def test_matrices_of_one_place_share_a_basis() -> None:
    shapes = {name: p.shape for name, p in TwoTowers().named_parameters()}
    fused = {group.names: (group.rows, group.columns, group.turned) for group in fused_matrices(shapes, TOWERS, 4)}
    assert fused == {
        ("vision.0.weight", "text.0.weight"): (48, (40, 24), False),
        ("vision.2.weight", "text.2.weight"): (48, (48, 48), False),
        ("head.weight",): (7, (48,), False),
    }
    more = {"vision.q": (16, 48), "text.q": (32, 48), "vision.v": (9, 8), "text.v": (7, 6)}
    groups = fused_matrices({name: torch.Size(shape) for name, shape in more.items()}, TOWERS, 2)
    fused = {group.names: (group.rows, group.columns, group.turned) for group in groups}
    assert fused[("vision.q", "text.q")] == (48, (16, 32), True)
    assert ("vision.v",) in fused and ("text.v",) in fused
