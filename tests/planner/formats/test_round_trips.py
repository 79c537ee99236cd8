"""Random plans go through every exporter and come back: as they are, or refused with one sentence."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from random_plans import random_plan
from read_back import EXPORTERS, read_back

from mmplan.errors import CheckError
from mmplan.planner.formats.megatron import export_megatron
from mmplan.planner.plan import Plan
from mmplan.scenario.formats.launch.script import read_script
from mmplan.scenario.formats.launch.torchtitan import read_torchtitan

NEEDS = {  # models that a target has words for; the others are refused
    "megatron-mimo": ("kimi-k2.5-1t", "internvl2.5-26b", "tiny"),
    "torchtitan": ("kimi-k2.5-1t", "pixtral-12b", "qwen2.5-vl-7b-sft", "qwen3-vl-30b-a3b"),
    "torchtitan-toml": ("kimi-k2.5-1t", "pixtral-12b", "qwen2.5-vl-7b-sft", "qwen3-vl-30b-a3b"),
}
QUICK = ("megatron-mimo", "torch-pipelining")  # the first refuses most, the second prices little


def plans(target: str, count: int) -> Sequence[Plan]:
    models = NEEDS.get(target)
    return [random_plan(seed) if models is None else random_plan(seed, models) for seed in range(count)]


@pytest.mark.parametrize("target", EXPORTERS)
def test_random_plans_come_back_or_are_refused_in_a_sentence(target: str, request: pytest.FixtureRequest) -> None:
    exported, asked = 0, request.config.getoption("--round-trips")
    for seed, plan in enumerate(plans(target, asked if target in QUICK else asked // 4)):
        try:
            made = EXPORTERS[target](plan)
        except CheckError as refusal:
            assert 30 < len(str(refusal)) < 250 and "\n" not in str(refusal), seed
            continue
        exported += 1
        try:
            read_back(target, plan, made)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert exported


def test_our_own_importer_reads_the_script_for_megatron(tmp_path: Path) -> None:
    file, read = tmp_path / "megatron.sh", 0
    for plan in plans("megatron", 5):
        try:
            file.write_text(export_megatron(plan).files["megatron.sh"])
        except CheckError:
            continue
        set_up = read_script(file)
        names = {"tp": plan.tp, "pp": plan.pp, "cp": plan.cp, "global_batch": plan.scenario.global_batch}
        assert {name: set_up.count(name) for name in names} == names
        read += 1
    assert read


def test_our_own_importer_reads_the_toml_for_torchtitan(tmp_path: Path) -> None:
    file, read = tmp_path / "plan.toml", 0
    for plan in plans("torchtitan-toml", 5):
        try:
            file.write_text(EXPORTERS["torchtitan-toml"](plan).files["plan.toml"])
        except CheckError:
            continue
        set_up = read_torchtitan(file)
        assert set_up.count("pp") == plan.pp and set_up.count("tp") == plan.tp
        read += 1
    assert read
