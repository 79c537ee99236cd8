"""`mmplan compare --expert`: published recipes beside a plan, as a user sees them."""

import json
from pathlib import Path

import pytest
from command_runs import mmplan

TINY = Path(__file__).parents[1] / "scenarios" / "tiny.yaml"
RECIPES = """
recipes:
  pipeline: {source: "a test of mmplan", pp: 4, vp: 2, microbatch: 1}
  three: {source: "a test of mmplan, which wants 3 devices", pp: 3}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `best.plan.json` of a scenario with two recipes, and `plain.plan.json` of one without."""
    path = tmp_path_factory.mktemp("expert")
    (path / "tiny.yaml").write_text(TINY.read_text() + RECIPES)
    assert mmplan("optimize", "tiny.yaml", "-o", "best.plan.json", cwd=path).returncode == 0
    assert mmplan("optimize", TINY, "-o", "plain.plan.json", cwd=path).returncode == 0
    return path


def test_the_document_holds_the_recipes_with_plan_or_reason(folder: Path) -> None:
    result = mmplan("compare", "best.plan.json", "--expert", "--json", "-", cwd=folder)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    best, expert, rule = document["plans"]
    assert (best["name"], expert["name"], expert["pp"], expert["schedule"]) == (
        "best",
        "expert pipeline",
        4,
        "interleaved",
    )
    pipeline, three, thumb = document["recipes"]
    assert (thumb["name"], thumb["plan"], thumb["modules"]) == ("rule of thumb", rule["name"], [])
    assert thumb["source"].startswith("arXiv 2104.04473")
    assert (pipeline["name"], pipeline["plan"], pipeline["vp"]) == ("pipeline", "expert pipeline", 2)
    assert "slower" in pipeline["reason"]
    assert "2 chunks per rank: " in pipeline["note"]
    assert (three["plan"], three["source"]) == (None, "a test of mmplan, which wants 3 devices")
    assert three["reason"].startswith("tp=1 x cp=1 x pp=3 = 3 devices do not divide the 4 of the cluster")


def test_the_tables_name_source_and_reason(folder: Path) -> None:
    result = mmplan("compare", "best.plan.json", "plain.plan.json", "--expert", "--html", "page.html", cwd=folder)
    assert result.returncode == 0, result.stderr
    for place in (result.stdout, (folder / "page.html").read_text()):
        words = " ".join(place.replace("│", " ").split())
        assert "expert pipeline" in words
        assert "pp 4, vp 2, microbatch 1" in words
        assert "not possible: tp=1" in words


def test_plans_alone_are_compared_as_before(folder: Path) -> None:
    result = mmplan("compare", "best.plan.json", "plain.plan.json", "--json", "-", cwd=folder)
    document = json.loads(result.stdout)
    assert [plan["name"] for plan in document["plans"]] == ["best", "plain"]
    assert document["recipes"] == []


def test_a_plan_without_recipes_is_held_against_the_rule_of_thumb(folder: Path) -> None:
    result = mmplan("compare", "plain.plan.json", "--expert", "--json", "-", cwd=folder)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    ours, rule = document["plans"]
    assert rule["name"] == "expert rule of thumb"
    assert rule["objective_s"] >= ours["objective_s"] * (1 - 1e-9)
