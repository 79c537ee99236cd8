"""The `recipes` part of a scenario file: published configurations, with the checks that need more than one key."""

from collections.abc import Mapping, Sequence

from mmplan.scenario.document import Document, KeyPath, did_you_mean, listed
from mmplan.scenario.recipe import Recipe
from mmplan.scenario.scenario import Model
from mmplan.scenario.schema import RecipeSpec


def recipes_from_spec(specs: Mapping[str, RecipeSpec], model: Model, document: Document) -> tuple[Recipe, ...]:
    """The recipes in their order. Whether one can be made of the cluster and the batch is asked when it is planned.

    Raises:
        InputError: several chunks per rank without a pipeline, or an unknown module in `spread`.
    """
    recipes = []
    for name, spec in specs.items():
        at: KeyPath = ("recipes", name)
        if spec.vp > 1 and spec.pp == 1:
            raise document.error((*at, "vp"), f"vp = {spec.vp} chunks per rank need a pipeline: pp is 1")
        spread = spread_modules(spec.spread, model, (*at, "spread"), document)
        technique = spec.technique.model_dump(exclude_unset=True, exclude_none=True) if spec.technique else {}
        written = {**spec.model_dump(), "spread": spread, "technique": tuple(technique.items())}
        recipes.append(Recipe(name=name, **written))
    return tuple(recipes)


def spread_modules(
    names: Sequence[str] | None, model: Model, at: KeyPath, document: Document
) -> tuple[str, ...] | None:
    """Names of modules that may be spread.

    Raises:
        InputError: one is unknown, or a language model.
    """
    if names is None:
        return None
    others = [module.name for module in model.modules if module.kind != "language_model"]
    for name in names:
        if name not in others:
            hint = did_you_mean(name, others) or f"; modules that can be: {listed(others)}"
            raise document.error(at, f"'{name}' cannot be spread{hint}")
    return tuple(names)
