"""Every query head is on one rank, which also has its key head."""

from itertools import product

from mmplan.cost_models.head_groups import HeadGroups


def test_each_query_is_on_one_rank_with_its_key_and_no_rank_has_more_than_its_room() -> None:
    for keys, per_key, tp in product(range(1, 10), range(1, 8), range(1, 17)):
        groups, queries = HeadGroups(keys * per_key, keys), keys * per_key
        seen: list[int] = []
        for rank in range(tp):
            first, end = groups.part(queries, tp, rank)
            first_key, end_key = groups.part(keys, tp, rank)
            assert end - first <= groups.on_rank(queries, tp)
            assert end_key - first_key <= groups.on_rank(keys, tp)
            assert all(first_key <= query // per_key < end_key for query in range(first, end))
            # one kernel takes as many queries for each key on every rank
            assert groups.on_rank(queries, tp) % groups.on_rank(keys, tp) == 0
            seen += range(first, end)
        assert seen == list(range(queries))


def test_ranks_with_copies_of_a_key_head_are_neighbours() -> None:
    """28 queries of 4 key heads over 8 ranks: 4 and 3 of 7 on each pair."""
    groups = HeadGroups(28, 4)
    assert groups.copies(8) == 2
    assert [groups.part(28, 8, rank) for rank in range(4)] == [(0, 4), (4, 7), (7, 11), (11, 14)]
    assert [groups.part(4, 8, rank) for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]


def test_ranks_that_no_query_needs_are_left_at_the_end() -> None:
    """6 queries of each of 2 key heads over 8 ranks: 2 on each of 3, and two ranks have none."""
    groups = HeadGroups(12, 2)
    assert groups.copies(8) == 3
    assert [end - first for first, end in (groups.part(12, 8, rank) for rank in range(8))] == [2] * 6 + [0, 0]
