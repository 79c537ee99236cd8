"""`--vary`: how keys and values are read, and the scenario files they make."""

from pathlib import Path

import pytest

from mmplan.errors import InputError
from mmplan.scenario.document import read_document
from mmplan.scenario.load import scenario_of
from mmplan.scenario.variations import Variation, parse_variation, points, varied

TINY = Path(__file__).parents[2] / "scenarios" / "tiny.yaml"

GOOD = {
    "cluster.nodes=1..8": (1, 2, 4, 8),
    "cluster.nodes=1..48": (1, 2, 4, 8, 16, 32, 48),
    "cluster.nodes=3..20": (3, 6, 12, 20),
    "batch.global=8..32+8": (8, 16, 24, 32),
    "batch.global=8..30+8": (8, 16, 24),
    "constraints.memory_headroom=0.1..0.3+0.1": (0.1, 0.2, 0.3),
    "batch.global=256,512": (256, 512),
    "batch.global=1,4..16,4": (1, 4, 8, 16),
    "cluster.device=h100-sxm,a100-sxm-80": ("h100-sxm", "a100-sxm-80"),
    "constraints.tp=[1,2],4": ([1, 2], 4),
    "cluster.node_link={link: pcie4-x16, latency: 1 us}": ({"link": "pcie4-x16", "latency": "1 us"},),
    "seed=7": (7,),
}


@pytest.mark.parametrize("text", GOOD)
def test_values_are_lists_doublings_and_steps(text: str) -> None:
    assert parse_variation(text) == Variation(key=text.partition("=")[0], values=GOOD[text])


BAD = {
    "cluster.nodes": "expected KEY=VALUES such as cluster.nodes=1..64 or batch.global=256,512",
    "=4": "expected KEY=VALUES such as cluster.nodes=1..64 or batch.global=256,512",
    "cluster..nodes=4": "expected KEY=VALUES such as cluster.nodes=1..64 or batch.global=256,512",
    "cluster.nodes=": "expected a value between commas, found none",
    "cluster.nodes=1,,2": "expected a value between commas, found none",
    "cluster.nodes=8..4": "the range 8..4 is empty: 4 is below 8",
    "cluster.nodes=0..4": "doubling from 0 never reaches 4; write a step: 0..4+1",
    "cluster.nodes=1..9+0": "expected a step above 0 in 1..9+0, found 0",
    "cluster.nodes=1..many": "expected numbers in the range 1..many, found 'many'",
    "cluster.nodes=1..inf": "expected numbers in the range 1..inf, found 'inf'",
    "cluster.nodes=1..100000+1": "1..100000+1 has more than 1,000 values",
    "cluster.nodes=[1": "expected a value, found '[1'",
}


@pytest.mark.parametrize("text", BAD)
def test_values_that_cannot_be_read_are_told_so(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_variation(text)
    assert str(caught.value) == f"--vary {text}: {BAD[text]}"


def test_points_are_every_combination_the_last_key_fastest() -> None:
    nodes, batch = parse_variation("cluster.nodes=1,2"), parse_variation("batch.global=8,16")
    assert [tuple(point.values()) for point in points([nodes, batch])] == [(1, 8), (1, 16), (2, 8), (2, 16)]


def test_points_are_few_and_their_keys_differ() -> None:
    many = parse_variation("seed=1..100+1")
    with pytest.raises(InputError, match="100 x 100 = 10,000 points, at most 1,000 are solved"):
        points([many, parse_variation("batch.global=1..100+1")])
    with pytest.raises(InputError, match="'seed' stands twice"):
        points([many, many])
    with pytest.raises(InputError, match="expected at least one key"):
        points([])


def test_any_key_of_the_file_can_have_another_value() -> None:
    document = read_document(TINY)
    changes = {"cluster.nodes": 2, "model.modules.llm.layers": 3, "constraints.pp": [2], "technique.attention": "math"}
    scenario = scenario_of(varied(document, changes))
    assert scenario.cluster.device_count == 8
    assert scenario.model.module("llm").transformer is not None
    assert scenario.model.module("llm").transformer.layers == 3  # type: ignore[union-attr]
    assert scenario.constraints.pp == (2,)
    assert scenario.technique.attention == "math"
    assert scenario_of(document).cluster.device_count == 4  # the document itself stays as it was


def test_an_unknown_key_is_told_with_the_nearest_one() -> None:
    with pytest.raises(InputError, match=r"cluster\.nodez: unknown key; did you mean 'nodes'\?"):
        scenario_of(varied(read_document(TINY), {"cluster.nodez": 2}))
    with pytest.raises(InputError, match=r"--vary precision\.kind: precision is 'fp32', not a mapping"):
        varied(read_document(TINY), {"precision.kind": "bf16"})
