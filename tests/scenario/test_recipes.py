"""Published recipes in a scenario file: what may be written, and what is refused with line and key."""

from pathlib import Path

import pytest

from mmplan.errors import InputError
from mmplan.planner.plan import scenario_hash
from mmplan.scenario.asked import OwnRanks
from mmplan.scenario.load import load_scenario
from mmplan.scenario.recipe import Recipe
from mmplan.scenario.scenario import Scenario

ROOT = Path(__file__).parents[2]
TINY = (ROOT / "scenarios" / "tiny.yaml").read_text()


def load(folder: Path, recipes: str) -> Scenario:
    file = folder / "tiny.yaml"
    file.write_text(f"{TINY}\nrecipes: {recipes}\n")
    return load_scenario(file)


def test_what_a_recipe_does_not_write_is_one_as_on_a_launch_command_or_open(tmp_path: Path) -> None:
    (recipe,) = load(tmp_path, "{hand: {source: someone, pp: 2}}").recipes
    assert recipe == Recipe(name="hand", source="someone", pp=2)
    assert (recipe.tp, recipe.cp, recipe.ep, recipe.vp) == (1, 1, 1, 1)
    assert (recipe.dp, recipe.microbatch, recipe.sharding, recipe.recompute, recipe.spread) == (None,) * 5
    assert (recipe.schedule, recipe.modules, recipe.technique) == (None, (), ())


def test_every_key_of_a_recipe_arrives(tmp_path: Path) -> None:
    text = "{a: {source: s, tp: 2, pp: 4, dp: 3, cp: 8, ep: 5, vp: 6, microbatch: 7, sharding: gradients, "
    more = "schedule: interleaved, modules: {audio: {tp: 2, dp: 4}}, technique: {offload: optimizer, dropout: true}}}"
    (recipe,) = load(tmp_path, text + "recompute: full, spread: [vision], " + more).recipes
    assert recipe == Recipe(
        name="a",
        source="s",
        tp=2,
        pp=4,
        dp=3,
        cp=8,
        ep=5,
        vp=6,
        microbatch=7,
        sharding="gradients",
        recompute="full",
        spread=("vision",),
        schedule="interleaved",
        modules=(OwnRanks(module="audio", tp=(2,), cp=(1,), ep=(1,), pp=(1,), dp=(4,)),),
        technique=(("offload", "optimizer"), ("dropout", True)),
    )
    assert recipe.unpriced == (("dropout", True),)


@pytest.mark.parametrize(
    ("recipes", "message"),
    [
        ("{a: {tp: 2}}", "recipes.a.source: this key is missing"),
        ("{a: {source: s, microbach: 2}}", "recipes.a.microbach: unknown key; did you mean 'microbatch'?"),
        ("{a: {source: s, tp: 0}}", "recipes.a.tp: expected at least 1, found 0"),
        ("{a: {source: s, tp: [1, 2]}}", "recipes.a.tp: expected a whole number, found a list of 2 items"),
        ("{a: {source: s, vp: 2}}", "recipes.a.vp: vp = 2 chunks per rank need a pipeline: pp is 1"),
        ("{a: {source: s, spread: [llm]}}", "recipes.a.spread: 'llm' cannot be spread; modules that can be: 'vision'"),
        ("{a: {source: s, modules: {llm: {dp: 2}}}}", "recipes.a.modules.llm: 'llm' cannot have ranks of its own"),
        (
            "{a: {source: s, modules: {vision: {tpp: 2}}}}",
            "recipes.a.modules.vision.tpp: unknown key; did you mean 'tp'?",
        ),
        ("{a: {source: s, pp: 2, vp: 4, schedule: zb-v}}", "recipes.a.vp: zb-v has 2 per rank here, found vp = 4"),
        ("{a: {source: s, pp: 2, schedule: interleaved}}", "recipes.a.schedule: an interleaved schedule runs several"),
        (
            "{a: {source: s, sharding: none, technique: {sharding: optimizer}}}",
            "recipes.a.sharding: technique says optimizer, and the recipe none; remove one of the two",
        ),
        ("{a: {source: s, sharding: zero3}}", "recipes.a.sharding: expected 'none', 'optimizer', 'gradients' or"),
        ("[1]", "recipes: expected a mapping, found a list of 1 item"),
    ],
)
def test_a_recipe_that_is_none_is_refused_with_its_key(tmp_path: Path, recipes: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, recipes)
    assert message in str(caught.value)


def test_recipes_leave_the_hash_of_a_scenario_alone(tmp_path: Path) -> None:
    """No plan depends on them: a recipe written down later must not make plans those of another scenario."""
    assert scenario_hash(load(tmp_path, "{a: {source: s, tp: 2}}")) == scenario_hash(load(tmp_path, "{}"))


@pytest.mark.parametrize("path", sorted((ROOT / "scenarios").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_recipe_fits_its_cluster(path: Path) -> None:
    scenario = load_scenario(path)
    for recipe in scenario.recipes:
        assert scenario.cluster.device_count % (recipe.tp * recipe.cp * recipe.pp) == 0, recipe.name
        assert len(recipe.source) > 20, recipe.name
