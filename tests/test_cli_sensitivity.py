"""From the command line: sensitivity -> optimize -> page, on a small scenario and as the guide says it."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmplan.cli import app
from mmplan.errors import InputError

ROOT = Path(__file__).parents[1]
SCENARIO = """\
name: small
model:
  modules:
    vision: {kind: vision_encoder, layers: 1, hidden: 16, heads: 2, ffn: 32, patch: 4, image_size: 8}
    projector: {kind: projector, dims: [16, 16]}
    llm: {kind: language_model, layers: 3, hidden: 16, heads: 2, kv_heads: 1, ffn: 32, vocabulary: 40}
  edges:
    - [vision, projector]
    - [projector, llm]
data: {text_tokens: [6, 9], images: 1}
batch: {global: 8}
precision: fp32
cluster: {device: cpu-core, nodes: 1, devices_per_node: 2}
constraints: {pp: [2], tp: 1, sensitivity: sensitivity.json}
"""
QUICK = ["--samples", "2", "--batches", "1", "--seeds", "2", "--iterations", "12", "--device", "cpu"]


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a scenario, whose file of sensitivities is measured."""
    made = tmp_path_factory.mktemp("sensitivity")
    (made / "small.yaml").write_text(SCENARIO)
    output = run("sensitivity", made / "small.yaml", "-o", made / "sensitivity.json", *QUICK, "--plot", made / "s.png",
                 "--json", made / "report.json")  # fmt: skip
    assert "rank correlation between seeds: vision" in output
    return made


def test_the_file_says_where_its_values_come_from(folder: Path) -> None:
    found = json.loads((folder / "sensitivity.json").read_text())
    assert found["schema"] == "mmplan.sensitivity/2"
    assert set(found["layers"]["llm.0"]) == {"vision", "text"}
    assert set(found["layers"]["vision.0"]) == {"vision"}
    assert found["layers"]["llm.0"]["vision"] == found["layers"]["llm.0"]["text"]  # every sample has an image
    source = found["source"]
    assert (source["samples"], source["batches"], source["seeds"], found["rule"]) == (2, 1, 2, "percentile:85")
    assert len(source["weights_sha256"]) == 64
    assert -1 <= source["rank_correlation"]["vision"] <= 1
    details = found["details"]["llm.0"]["text"]
    assert details["low"] < found["layers"]["llm.0"]["text"] < details["high"]
    assert details["difference"] < 0.01
    assert not list(folder.glob("*.partial.json"))
    assert (folder / "s.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((folder / "report.json").read_text())
    assert {zone["zone"] for zone in report["measured"]["zones"]}
    assert report["estimate"]["values"] == 2 * (2 + 1 + 2 * 5)


def test_zones_stand_on_the_page_of_the_plan_with_their_price(folder: Path) -> None:
    zones = [zone["zone"] for zone in json.loads((folder / "report.json").read_text())["measured"]["zones"]]
    output = run("optimize", folder / "small.yaml", "-o", folder / "plan.json", "--zone-prices", "--html",
                 folder / "page.html", "--schedule-search", "0")  # fmt: skip
    page = (folder / "page.html").read_text()
    for zone in zones:
        assert zone in output
        assert f"<td>{zone}</td>" in page
    assert len(re.findall("data:image/png;base64", page)) == 2
    assert "http" not in page.split("<body>")[1]
    assert run("check", folder / "plan.json")


def test_a_dry_run_prints_the_cost_and_writes_nothing(folder: Path) -> None:
    target = folder / "dry.json"
    output = run("sensitivity", folder / "small.yaml", "-o", target, *QUICK, "--dry-run", "--json", "-")
    assert json.loads(output)["measured"] is None
    assert json.loads(output)["estimate"]["most"] == 12
    assert not target.exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--rule", "best"], "--rule: 'best' is no rule: expected percentile:85, top:3, above:2.5 or gap"),
        (["--device", "tpu"], "--device: expected 'cpu' or 'cuda', found 'tpu'"),
        (["-o", "nowhere/s.json"], "nowhere/s.json: cannot write: folder 'nowhere' does not exist"),
    ],
)
def test_wrong_options_are_one_sentence(folder: Path, options: list[str], expected: str) -> None:
    with pytest.raises(InputError) as caught:
        run("sensitivity", folder / "small.yaml", *options)
    assert str(caught.value) == expected


def test_the_commands_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block of docs/sensitivity.md, on the small scenario and with the fewest samples."""
    text = (ROOT / "docs" / "sensitivity.md").read_text()
    first, line, second = re.findall(r"^    (?:mmplan|#).*", text, re.MULTILINE)[:3]
    constraints = re.search(r"constraints: \{(.*)\}", line)
    assert constraints is not None
    scenario = SCENARIO.replace("sensitivity: sensitivity.json", constraints[1])
    for name in ("tiny.yaml", "my.yaml"):
        (tmp_path / name).write_text(scenario)
    monkeypatch.chdir(tmp_path)  # where the plan is written
    for command in (first, second):
        words = command.split()[1:]
        words = [str(tmp_path / Path(word).name) if re.search(r"\.(yaml|json|html)$", word) else word for word in words]
        run(*words)
    assert (tmp_path / "plan.html").exists()
