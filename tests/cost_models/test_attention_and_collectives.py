"""Attention by implementation, and collectives by level, against arithmetic on paper."""

from dataclasses import replace

import pytest
from small_models import DEVICE, NETWORK_LINK, NODE_LINK

from mmplan.cost_models.attention_time import fused_attention_s, score_bytes
from mmplan.cost_models.collectives import Group, all_reduce_s, all_to_all_s, gather_s, group_of, message_s
from mmplan.cost_models.stragglers import straggler_share

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


def test_small_messages_take_the_tree_and_large_ones_the_ring() -> None:
    """8 ranks: a ring has 2 x 7 latencies and moves 7/8 twice, a tree 2 x 3 and all of it twice at 0.92."""
    group, rate = Group(8, 8), 50e9
    assert all_reduce_s(1.0, group, NODE_LINK, NETWORK_LINK) == pytest.approx(6 * 2e-6, rel=1e-3)
    ring_s = 14 * 2e-6 + 2 * 7 / 8 * 10e9 / rate
    assert all_reduce_s(10e9, group, NODE_LINK, NETWORK_LINK) == pytest.approx(ring_s)
    sizes = [10.0**power for power in range(2, 11)]
    for size in sizes:
        tree_s = 6 * 2e-6 + 2 * size / 0.92 / rate
        ring_s = 14 * 2e-6 + 2 * 7 / 8 * size / rate
        assert all_reduce_s(size, group, NODE_LINK, NETWORK_LINK) == pytest.approx(min(tree_s, ring_s))


def test_switches_that_add_move_each_byte_once() -> None:
    nvls, sharp = replace(NODE_LINK, nvls=True), replace(NETWORK_LINK, sharp=True)
    assert all_reduce_s(10e9, Group(8, 8), nvls, NETWORK_LINK) == pytest.approx(25e-6 + 10e9 * 6 / 5 / 50e9)
    assert all_reduce_s(10e9, Group(2, 2), nvls, SLOW) == all_reduce_s(10e9, Group(2, 2), NODE_LINK, SLOW)
    across_s = 31e-6 + 10e9 / 4 / 0.95 / 5e9
    inside_s = 2 * 3 / 4 * 10e9 / 50e9
    assert all_reduce_s(10e9, Group(16, 4), FAST, sharp) == pytest.approx(inside_s + across_s)
    assert gather_s(10e9, Group(16, 4), nvls, sharp) == gather_s(10e9, Group(16, 4), NODE_LINK, NETWORK_LINK)


def test_an_oversubscribed_network_gives_that_much_less() -> None:
    shared = replace(SLOW, oversubscription=2.0)
    assert gather_s(8e9, Group(16, 1), FAST, shared) == pytest.approx(2 * gather_s(8e9, Group(16, 1), FAST, SLOW))
    assert all_to_all_s(8e9, Group(8, 8), FAST, shared) == all_to_all_s(8e9, Group(8, 8), FAST, SLOW)


def test_waiting_for_stragglers_starts_beyond_the_fitted_nodes() -> None:
    assert straggler_share(1) == straggler_share(64) == 0.0
    assert straggler_share(256) == pytest.approx(2 * 0.005)


def test_all_to_all_waits_for_the_slower_level() -> None:
    """8 ranks, 4 in a node: half of each rank's bytes cross nodes."""
    assert all_to_all_s(8e9, Group(8, 4), FAST, SLOW) == pytest.approx(8e9 * 4 / 8 / 5e9)
    assert all_to_all_s(8e9, Group(1, 1), FAST, SLOW) == 0.0


def test_direct_links_give_a_group_its_share() -> None:
    """Three peers: two devices have a third of the rate, four all of it; each of four sends to three at a time."""
    mesh = replace(FAST, direct_peers=3)
    assert gather_s(6e9, Group(2, 2), mesh, SLOW) == pytest.approx(3 * gather_s(6e9, Group(2, 2), FAST, SLOW))
    assert gather_s(6e9, Group(4, 4), mesh, SLOW) == pytest.approx(gather_s(6e9, Group(4, 4), FAST, SLOW))
    assert message_s(6e9, mesh) == pytest.approx(3 * message_s(6e9, FAST))
    assert all_to_all_s(6e9, Group(4, 4), mesh, SLOW) == pytest.approx(6e9 * 3 / 4 / 50e9)


def test_levels_that_work_at_a_time_take_as_long_as_the_slower_one() -> None:
    """16 ranks, 4 in a node: 3/4 of the bytes inside, 3/4 of a quarter of them across; a ring through all: 15/16."""
    both = replace(SLOW, pipelined=True)
    assert gather_s(80e9, Group(16, 4), FAST, both) == pytest.approx(max(3 / 4 * 80e9 / 50e9, 15 / 16 * 20e9 / 5e9))
    ring = replace(both, rings=True)
    assert all_reduce_s(80e9, Group(16, 4), FAST, both) == pytest.approx(2 * 3 / 4 * 20e9 / 5e9)
    assert all_reduce_s(80e9, Group(16, 4), FAST, ring) == pytest.approx(2 * 15 / 16 * 20e9 / 5e9)
    assert all_reduce_s(80e9, Group(4, 1), FAST, ring) == all_reduce_s(80e9, Group(4, 1), FAST, both)
    assert gather_s(80e9, Group(16, 1), FAST, both) == gather_s(80e9, Group(16, 1), FAST, SLOW)
    assert gather_s(1.0, Group(16, 4), NODE_LINK, replace(NETWORK_LINK, pipelined=True)) == pytest.approx(
        3 * 2e-6 + 3 * 10e-6, rel=1e-3
    )


def test_switches_inside_add_beside_a_network_that_works_at_the_same_time() -> None:
    quick = replace(SLOW, bytes_per_s=1e15, pipelined=True)
    nvls_s = 25e-6 + 80e9 * 6 / 5 / 50e9
    assert all_reduce_s(80e9, Group(16, 8), replace(FAST, nvls=True), quick) == pytest.approx(nvls_s, rel=1e-3)
