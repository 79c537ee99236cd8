"""Profile files: what a scenario takes from them, and what is refused."""

from pathlib import Path

import pytest
import yaml

from mmplan.errors import InputError
from mmplan.scenario.load import load_scenario
from mmplan.scenario.profile import Measured, Profile, load_profile, profile_document, save_profile

TINY = (Path(__file__).parents[2] / "scenarios" / "tiny.yaml").read_text()

GOOD = {"value": 0.5, "p10": 0.4, "p90": 0.6, "source": "measured", "n": 1, "residual": 0.0}


def number(value: float, spread: float = 2.0) -> Measured:
    return Measured(value=value, p10=value / spread, p90=value * spread, source="measured", n=9, residual=0.1)


def a_profile() -> Profile:
    return Profile(
        base="cpu-core",
        device="a core",
        kind="cpu",
        date="2026-01-01T00:00:00+00:00",
        quick=True,
        software={"torch": "2.9"},
        parameters={
            "fp32_flops_per_s": number(5e10),
            "gemm_fraction": number(0.75),
            "launch_s": number(3e-6),
            "attention.flash2": number(0.5),
        },
        link={"bytes_per_s": number(3e9), "latency_s": number(2e-5)},
    )


def scenario_file(folder: Path, cluster: str) -> Path:
    path = folder / "s.yaml"
    path.write_text(TINY.replace("cluster: {device: cpu-core,", f"cluster: {{{cluster},"))
    return path


def test_a_profile_reads_as_it_was_written(tmp_path: Path) -> None:
    save_profile(a_profile(), tmp_path / "p.yaml")
    assert load_profile(tmp_path / "p.yaml") == a_profile()


@pytest.mark.parametrize("cluster", ["profile: p.yaml", "profile: p.yaml, device: cpu-core"])
def test_measured_numbers_replace_those_of_the_catalogue(tmp_path: Path, cluster: str) -> None:
    save_profile(a_profile(), tmp_path / "p.yaml")
    pool = load_scenario(scenario_file(tmp_path, cluster)).cluster.pools[0]
    device, link = pool.device, pool.node_link
    assert (device.name, device.fp32_flops_per_s, device.gemm_fraction, device.launch_s) == (
        "cpu-core", 5e10, 0.75, 3e-6,
    )  # fmt: skip
    assert dict(device.attention)["flash2"] == device.attention_fraction == 0.5
    assert (link.bytes_per_s, link.latency_s, link.fraction) == (3e9, 2e-5, 1.0)
    origins = {origin.parameter: origin for origin in device.origins}
    assert origins["gemm_fraction"].kind == "measured"
    assert origins["gemm_fraction"].p10 == 0.5
    assert origins["memory_fraction"].kind == "assumed"  # not measured: the catalogue's
    assert "p.yaml" in device.source


def test_a_link_that_the_scenario_names_goes_before_the_measured_one(tmp_path: Path) -> None:
    save_profile(a_profile(), tmp_path / "p.yaml")
    pool = load_scenario(scenario_file(tmp_path, "profile: p.yaml, node_link: pcie4")).cluster.pools[0]
    assert pool.node_link.bytes_per_s == 31.5e9


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "other/1"}, "schema"),
        ({"base": "h100-sxn"}, "did you mean 'h100-sxm'?"),
        ({"colour": "red"}, "unknown key"),
        ({"parameters": {"gemm_fractoin": {}}}, "this key is missing"),
        ({"parameters": {"gemm_fractoin": GOOD}}, "did you mean 'gemm_fraction'?"),
        ({"parameters": {"gemm_fraction": {**GOOD, "value": 0.7}}}, "expected p10 <= value <= p90"),
        ({"parameters": {"gemm_fraction": {**GOOD, "value": 1.5, "p90": 2.0}}}, "a fraction of at most 1"),
        ({"parameters": {"launch_s": {**GOOD, "value": -1.0}}}, "greater than 0"),
        ({"parameters": {"launch_s": {**GOOD, "value": float("nan")}}}, "finite"),
        ({"link": {"latency_s": GOOD}}, "expected 'bytes_per_s', 'latency_s', found 'latency_s'"),
    ],
)
def test_a_bad_profile_is_answered_with_one_sentence(tmp_path: Path, change: dict[str, object], said: str) -> None:
    (tmp_path / "p.yaml").write_text(yaml.safe_dump({**profile_document(a_profile()), **change}))
    with pytest.raises(InputError) as caught:
        load_scenario(scenario_file(tmp_path, "profile: p.yaml"))
    assert said in str(caught.value)
    assert "p.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ("profile: none.yaml", "s.yaml:51: cluster.profile: no such file 'none.yaml'"),
        ("profile: p.yaml, device: h100-sxm", "the profile was measured on 'cpu-core', cluster.device is 'h100-sxm'"),
        ("name: nothing", "cluster.device: this key is missing, and there is no 'profile' and are no 'pools' in its"),
    ],
)
def test_a_cluster_without_its_profile_or_device_is_refused(tmp_path: Path, cluster: str, said: str) -> None:
    save_profile(a_profile(), tmp_path / "p.yaml")
    with pytest.raises(InputError) as caught:
        load_scenario(scenario_file(tmp_path, cluster))
    assert said in str(caught.value)
