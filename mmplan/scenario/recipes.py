"""The `recipes` part of a scenario file: published configurations, with the checks that need more than one key."""

from collections.abc import Mapping, Sequence

from mmplan.scenario.asked import OwnRanks
from mmplan.scenario.document import Document, KeyPath, did_you_mean, listed
from mmplan.scenario.recipe import Recipe
from mmplan.scenario.scenario import Model
from mmplan.scenario.schedule_names import IN_TWO_CHUNKS
from mmplan.scenario.schema_technique import RecipeSpec


def recipes_from_spec(specs: Mapping[str, RecipeSpec], model: Model, document: Document) -> tuple[Recipe, ...]:
    """The recipes in their order. Whether one can be made of the cluster and the batch is asked when it is planned.

    Raises:
        InputError: several chunks per rank without a pipeline or under a schedule that has none, a choice that is said
            twice, or an unknown module in `spread` or `modules`.
    """
    recipes = []
    for name, spec in specs.items():
        at: KeyPath = ("recipes", name)
        if spec.vp > 1 and spec.pp == 1:
            raise document.error((*at, "vp"), f"vp = {spec.vp} chunks per rank need a pipeline: pp is 1")
        _require_chunks(spec, at, document)
        spread = spread_modules(spec.spread, model, (*at, "spread"), document)
        technique = spec.technique.model_dump(exclude_unset=True, exclude_none=True) if spec.technique else {}
        for key in ("sharding", "recompute"):
            if key in technique and getattr(spec, key) not in (None, technique[key]):
                message = f"technique says {technique[key]}, and the recipe {getattr(spec, key)}; remove one of the two"
                raise document.error((*at, key), message)
        written = {
            **spec.model_dump(),
            "spread": spread,
            "modules": own_ranks(spec, model, (*at, "modules"), document),
            "technique": tuple(technique.items()),
        }
        recipes.append(Recipe(name=name, **written))
    return tuple(recipes)


def _require_chunks(spec: RecipeSpec, at: KeyPath, document: Document) -> None:
    """The schedule runs as many chunks per rank as the recipe says."""
    if spec.schedule is None:
        return
    if spec.schedule == "interleaved" and spec.vp == 1:
        message = "an interleaved schedule runs several chunks of layers per rank: write how many as vp, such as 2"
        raise document.error((*at, "schedule"), message)
    most = spec.vp if spec.schedule == "interleaved" else 2 if spec.schedule in IN_TWO_CHUNKS else 1
    if spec.vp > most:
        raise document.error((*at, "vp"), f"{spec.schedule} has {most} per rank here, found vp = {spec.vp}")


def own_ranks(spec: RecipeSpec, model: Model, at: KeyPath, document: Document) -> tuple[OwnRanks, ...]:
    """Modules with ranks of their own; degrees that are not written are 1, replicas as many as is best.

    Raises:
        InputError: one is unknown, or a language model.
    """
    others, found = [module.name for module in model.modules if module.kind != "language_model"], []
    for name, one in spec.modules.items():
        if name not in others:
            hint = did_you_mean(name, others) or f"; modules that can: {listed(others)}"
            raise document.error((*at, name), f"'{name}' cannot have ranks of its own{hint}")
        dp = () if one.dp is None else (one.dp,)
        found.append(OwnRanks(module=name, tp=(one.tp,), cp=(one.cp,), ep=(one.ep,), pp=(one.pp,), dp=dp))
    return tuple(found)


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
