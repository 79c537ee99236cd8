"""Published recipes beside plans, and the rule of thumb: names of their columns, and what is said of each below."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from mmplan.planner.plan import Plan
from mmplan.planner.recipes import PlannedRecipe
from mmplan.report.tables import table
from mmplan.scenario.asked import OwnRanks
from mmplan.scenario.recipe import PLANNED, Recipe

DEGREES = ("tp", "cp", "pp", "vp", "dp", "ep", "etp")


def column_name(planned: PlannedRecipe) -> str:
    return f"expert {planned.recipe.name}"


def recipe_plans(recipes: Sequence[PlannedRecipe]) -> dict[str, Plan]:
    """The plans of those that have one, by the names of their columns."""
    return {column_name(planned): planned.plan for planned in recipes if planned.plan is not None}


def recipe_tables(recipes: Sequence[PlannedRecipe], ours: str) -> list[Table]:
    """What each recipe says and how it compares with the plan `ours`, or why it cannot be; nothing without recipes."""
    if not recipes:
        return []
    result = table(
        "Expert recipes, each with the best cut of its degrees",
        "recipe",
        "says",
        f"against {ours}, by the closed form",
        "source",
    )
    for planned in recipes:
        told = planned.reason if planned.plan is not None else f"not possible: {planned.reason}"
        remarks = [text for text in (told, planned.note) if text]
        result.add_row(
            planned.recipe.name, said(planned.recipe), escape("; ".join(remarks)), escape(planned.recipe.source)
        )
    return [result]


def said(recipe: Recipe) -> str:
    """`tp 8, pp 4, microbatch 2`: what a recipe writes, without degrees of 1."""
    degrees = [f"{name} {degree}" for name in DEGREES if (degree := getattr(recipe, name)) not in (None, 1)]
    degrees += [_apart(one) for one in recipe.modules]
    rest = [f"microbatch {recipe.microbatch}"] if recipe.microbatch is not None else []
    rest += [recipe.schedule] if recipe.schedule is not None else []
    rest += [f"{recipe.sharding} sharded"] if recipe.sharding not in (None, "none") else []
    rest += [f"recompute {recipe.recompute}"] if recipe.recompute is not None else []
    rest += [f"{' and '.join(recipe.spread)} spread"] if recipe.spread else []
    rest += [f"{name} {str(value).lower()}" for name, value in recipe.technique if name in PLANNED]
    return ", ".join([*degrees, *rest]) or "one device per replica"


def _apart(own: OwnRanks) -> str:
    """`vision apart with dp 8`: degrees of 1 are left out, and replicas that are as is best."""
    degrees = [(name, getattr(own, name)) for name in ("tp", "cp", "pp", "dp", "ep")]
    told = " ".join(f"{name} {values[0]}" for name, values in degrees if values and values != (1,))
    return f"{own.module} apart with {told}" if told else f"{own.module} apart"
