"""Attention by implementation, and collectives by level, against arithmetic on paper."""

from dataclasses import replace

import pytest
from small_models import DEVICE, NETWORK_LINK, NODE_LINK

from mmplan.cost_models.attention_time import fused_attention_s, score_bytes
from mmplan.cost_models.collectives import Group, all_reduce_s, all_to_all_s, gather_s, group_of

FAST, SLOW = (replace(NODE_LINK, latency_s=0.0), replace(NETWORK_LINK, latency_s=0.0))  # 50 and 5 GB/s reached


def test_causal_attention_executes_half_and_half_a_tile_per_row() -> None:
    device = replace(DEVICE, attention=(("flash2", 0.5),))
    full = fused_attention_s(4e12, 1e6, 1e3, 128, False, device, "flash2", 8e12)
    assert full == pytest.approx(4e12 / 4e12)
    causal = fused_attention_s(4e12, 1e6, 1e3, 128, True, device, "flash2", 8e12)
    assert causal == pytest.approx(full * 0.5 * (1 + 128 / 1000))


def test_small_heads_pay_for_their_exponentials() -> None:
    gpu = replace(DEVICE, sm_count=100, bf16_flops_per_s=700e12)
    wide, narrow = (fused_attention_s(1e15, 1e9, 1e5, dim, False, gpu, "flash2", 700e12) for dim in (128, 64))
    assert wide < narrow < 2 * wide


def test_stored_scores_move_bytes_for_softmax_and_dropout() -> None:
    assert score_bytes(10, dropout=False, backward=False) == 40
    assert score_bytes(10, dropout=True, backward=True) == 110


def test_ranks_of_a_group_in_one_node_follow_its_stride() -> None:
    assert group_of(16, 2, 8) == Group(16, 4)
    assert group_of(16, 8, 8) == Group(16, 1)
    assert group_of(2, 1, 8) == Group(2, 2)


def test_gather_across_nodes_adds_the_levels() -> None:
    """16 ranks, 4 in a node: 3/4 of the bytes inside, 3/4 of a quarter of them across on each rank's own port."""
    expected = 3 / 4 * 80e9 / 50e9 + 3 / 4 * 20e9 / 5e9
    assert gather_s(80e9, Group(16, 4), FAST, SLOW) == pytest.approx(expected)
    assert all_reduce_s(80e9, Group(16, 4), FAST, SLOW) == pytest.approx(2 * expected)


def test_sharing_a_node_with_more_ranks_of_the_group_is_faster() -> None:
    alone, together = (gather_s(1e9, Group(16, inside), FAST, SLOW) for inside in (1, 8))
    assert together < alone


def test_all_to_all_waits_for_the_slower_level() -> None:
    """8 ranks, 4 in a node: half of each rank's bytes cross nodes."""
    assert all_to_all_s(8e9, Group(8, 4), FAST, SLOW) == pytest.approx(8e9 * 4 / 8 / 5e9)
    assert all_to_all_s(8e9, Group(1, 1), FAST, SLOW) == 0.0
