"""Links written in a scenario file: of the user's own, and catalogue links with some numbers replaced."""

from pathlib import Path

import pytest
from test_bad_scenarios import GOOD

from mmplan.errors import InputError
from mmplan.scenario.catalogue import catalogue_link
from mmplan.scenario.cluster import Link
from mmplan.scenario.load import load_scenario
from mmplan.scenario.origin import origin_of


def network(folder: Path, text: str) -> Link:
    path = folder / "scenario.yaml"
    path.write_text(GOOD.replace("devices_per_node: 4", f"devices_per_node: 4, network: {text}"))
    return load_scenario(path).cluster.network_link


def test_a_catalogue_link_can_be_oversubscribed(tmp_path: Path) -> None:
    base, link = catalogue_link("ndr-400"), network(tmp_path, "{link: ndr-400, oversubscription: 2, sharp: true}")
    assert link.reached_bytes_per_s == pytest.approx(base.reached_bytes_per_s / 2)
    assert (link.sharp, base.sharp, link.latency_s) == (True, False, base.latency_s)
    assert link.origins == base.origins


def test_a_replaced_number_is_an_assumption(tmp_path: Path) -> None:
    link = network(tmp_path, "{link: ndr-400, fraction: 0.9}")
    assert link.fraction == 0.9
    assert origin_of(catalogue_link("ndr-400").origins, "fraction").kind == "fitted"
    assert origin_of(link.origins, "fraction").kind == "assumed"


def test_a_link_of_ones_own_reaches_all_of_its_bandwidth(tmp_path: Path) -> None:
    link = network(tmp_path, "{bandwidth: 400 Gb/s, latency: 5 us}")
    assert link.reached_bytes_per_s == pytest.approx(50e9)
    assert not link.nvls and not link.sharp


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{latency: 5 us}", "cluster.network.bandwidth: this key is missing"),
        ("{bandwidth: 400 Gb/s}", "cluster.network.latency: this key is missing"),
        ("{link: ndr-300}", "cluster.network.link: expected a catalogue link .* found 'ndr-300'"),
        (
            "{link: ndr-400, oversubscription: 0.5}",
            "cluster.network.oversubscription: expected at least 1.0, found 0.5",
        ),
    ],
)
def test_what_a_link_lacks_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        network(tmp_path, text)


def test_only_switched_nvlink_of_the_fourth_generation_on_adds_in_the_switch() -> None:
    names = ("nvlink3", "nvlink4-bridge", "nvlink4", "nvlink5", "ndr-400")
    assert [catalogue_link(name).nvls for name in names] == [False, False, True, True, False]


def test_a_link_says_how_it_is_built_and_where_its_numbers_come_from(tmp_path: Path) -> None:
    link = network(tmp_path, "{link: ndr-400, pipelined: true, rings: true, direct_peers: 3, source: measured}")
    assert (link.pipelined, link.rings, link.direct_peers, link.source) == (True, True, 3, "measured")
    assert link.group_bytes_per_s(2) == pytest.approx(link.reached_bytes_per_s / 3)
    assert link.group_bytes_per_s(4) == link.group_bytes_per_s(8) == link.reached_bytes_per_s
