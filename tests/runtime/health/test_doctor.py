"""The proof of the doctor: runs with a planted fault, whose cause it names first, and healthy ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from health_toys import PLANTS, run_toy, toy
from typer.testing import CliRunner

from mmplan.cli import app
from mmplan.errors import InputError
from mmplan.runtime.health.doctor import examine
from mmplan.runtime.health.hooks import attach
from mmplan.runtime.health.readings import Reading, load_silent, write_readings
from mmplan.runtime.health.rules import RULES

SOUND = Reading(
    step=0, time_s=0.0, rank=0, monitor="headroom", of="vision", value=9.0, limit=1.0, beyond=False, fired=False
)


def doctor(file: Path) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and findings of `mmplan doctor FILE --json -`."""
    result = CliRunner().invoke(app, ["doctor", str(file), "--json", "-"])
    return result.exit_code, json.loads(result.stdout)["findings"]


@pytest.mark.parametrize("name", PLANTS)
def test_the_planted_cause_is_named_first(name: str, tmp_path: Path) -> None:
    plant, file = PLANTS[name], tmp_path / "health.jsonl"
    run_toy(file, plant)
    code, findings = doctor(file)
    first = findings[0]
    assert code == 1
    assert (first["monitor"], first["of"]) == (plant.monitor, plant.of), [f["monitor"] for f in findings]
    assert not first["follows"]
    assert abs(first["began"] - plant.at) <= (20 if plant.monitor == "drift" else 2)
    assert all(other["follows"] for other in findings[1:]), [(f["monitor"], f["of"], f["follows"]) for f in findings]


@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_said_of_a_healthy_run(seed: int, tmp_path: Path) -> None:
    file = tmp_path / "health.jsonl"
    run_toy(file, seed=seed)
    readings = examine(file).readings
    assert {reading.monitor for reading in readings} >= RULES.keys() - {"cmrc", "overflow", "feature_jitter"}
    assert doctor(file) == (0, [])


def test_causes_explain_no_cause_of_their_own() -> None:
    import networkx as nx

    edges = [(rule.monitor, other) for rule in RULES.values() for other in rule.explains if other != rule.monitor]
    assert {other for _, other in edges} <= RULES.keys()
    assert nx.is_directed_acyclic_graph(nx.DiGraph(edges))


def test_the_command_tells_cause_and_advice_and_ends_with_1(tmp_path: Path) -> None:
    file, page = tmp_path / "health.jsonl", tmp_path / "page.html"
    run_toy(file, PLANTS["an fp16 block of the image tower overflows"])
    result = CliRunner().invoke(app, ["doctor", str(file), "--html", str(page)])
    assert result.exit_code == 1
    told = " ".join(result.stdout.split())
    assert "1. overflow at vision.block (a fact)" in told
    assert "path vision.block > vision.norm" in told
    assert "follows from overflow" in told
    assert "vision.block" in page.read_text() and page.read_text().count("<img") >= 8
    result = CliRunner().invoke(app, ["doctor", str(file), "--json", "-"])
    document = json.loads(result.stdout)
    assert document["schema"] == "mmplan.doctor/1" and not document["healthy"]
    assert document["findings"][0]["detail"]["modality"] == "vision"


def test_the_command_ends_with_0_where_all_is_well(tmp_path: Path) -> None:
    file = tmp_path / "health.jsonl"
    run_toy(file, steps=12)
    result = CliRunner().invoke(app, ["doctor", str(file)])
    assert result.exit_code == 0 and "nothing found" in result.stdout
    told = " ".join(result.stdout.split())
    assert "not read: feature_jitter: only runs of `mmplan execute` tell" in told and "not read: jed" not in told


def test_the_command_tells_what_could_not_be_read_and_why(tmp_path: Path) -> None:
    file, page = tmp_path / "health.jsonl", tmp_path / "page.html"
    with attach(toy(), file=file, modalities={"vision": "vision", "text": "text"}) as health:
        health.step()
    with file.open("a") as end:
        write_readings(end, [SOUND])
    result = CliRunner().invoke(app, ["doctor", str(file), "--html", str(page), "--json", str(tmp_path / "d.json")])
    told = " ".join(result.stdout.split())
    silent = json.loads((tmp_path / "d.json").read_text())["silent"]
    assert {"jed", "cmrc", "drift", "robustness", "attention_collapse", "kv_shift"} <= silent.keys()
    assert "not read: jed: `embeddings` names no module" in told and "not read: kv_shift" in page.read_text()
    assert "headroom" not in silent and "gradient_variance" not in silent
    with attach(torch.compile(toy()), file=file):
        pass
    assert "the model is compiled" in load_silent(file)["headroom"]
    with pytest.raises(InputError, match=r"no reading was taken, so nothing .*model is compiled"):
        examine(file)
