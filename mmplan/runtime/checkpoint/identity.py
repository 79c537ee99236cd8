"""May a run go on from a checkpoint? Both have to train one model on the same data in the same way.

What a plan chooses (degrees, cuts, sharding, recomputation, schedule, microbatches) may differ, and so may the cluster.
"""

from collections.abc import Iterator
from typing import Any

from mmplan.planner.plan import Plan, plan_document

# Keys of the resolved scenario; a model's modules say what is trained.
_SAME = ("model", "optimizer", "global_batch", "precision", "seed", "data")


def difference(saved: Plan, plan: Plan) -> str | None:
    """The first thing in which the trainings differ: `optimizer.learning_rate is 0.1 in the checkpoint and 0.01 in the
    plan`; None where they do not."""
    before, now = (_scenario(one) for one in (saved, plan))
    for key in _SAME:
        for path, old, new in _differences(before[key], now[key], key):
            return f"{path} is {_shown(old)} in the checkpoint and {_shown(new)} in the plan"
    return None


def _scenario(plan: Plan) -> dict[str, Any]:
    scenario = plan_document(plan)["scenario"]
    assert isinstance(scenario, dict)
    return {**scenario, "model": {**scenario["model"], "name": None}}  # which decides nothing


def _differences(old: Any, new: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (a, b) in enumerate(zip(old, new, strict=True)):
            name = a.get("name", index) if isinstance(a, dict) else index
            yield from _differences(a, b, f"{path}.{name}")
    elif old != new:
        yield path, old, new


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "absent" if value is None else "there" if isinstance(value, dict) else f"{value!r}"
