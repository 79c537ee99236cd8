"""Layer ids have a short form for files and a long form for code."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmplan.scenario.layer_ids import expand_ids, shorten_ids


def test_consecutive_blocks_become_a_range() -> None:
    ids = ("vision.embed", "vision.0", "vision.1", "vision.2", "llm.embed", "llm.7")
    assert shorten_ids(ids) == ("vision.embed", "vision.0-2", "llm.embed", "llm.7")


def test_a_gap_ends_a_range() -> None:
    assert shorten_ids(("llm.0", "llm.2", "llm.3")) == ("llm.0", "llm.2-3")


@given(
    st.lists(st.tuples(st.sampled_from(["vision", "llm", "a.b"]), st.integers(0, 99) | st.just("embed")), max_size=30)
)
def test_shortening_and_expanding_are_inverse(parts: list[tuple[str, int | str]]) -> None:
    ids = tuple(f"{module}.{index}" for module, index in parts)
    assert expand_ids(shorten_ids(ids)) == ids


@pytest.mark.parametrize("item", ["llm.5-3", "llm.0-99999999999"])
def test_a_range_that_cannot_be_meant_is_refused(item: str) -> None:
    with pytest.raises(ValueError, match="is not a range of layers"):
        expand_ids((item,))
