"""Reads an exported module for JAX without JAX: PartitionSpecs as the tuples that they are written as."""

import sys
from types import ModuleType
from typing import Any

from mmplan.scenario.layer_ids import expand_ids


class _Spec(tuple[Any, ...]):
    def __new__(cls, *parts: Any) -> "_Spec":
        return super().__new__(cls, parts)


def read_module(text: str) -> dict[str, Any]:
    """Its names, with a stand-in for `jax.sharding` while it is imported."""
    kept = {name: sys.modules.get(name) for name in ("jax", "jax.sharding")}
    fake = ModuleType("jax.sharding")
    fake.PartitionSpec = _Spec  # type: ignore[attr-defined]
    sys.modules["jax"], sys.modules["jax.sharding"] = ModuleType("jax"), fake
    try:
        names: dict[str, Any] = {}
        exec(compile(text, "jax_plan.py", "exec"), names)
    finally:
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    return names


def parameters_by_layer(names: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Parameters of every layer by its id."""
    return {layer: group["parameters"] for group in names["LAYERS"] for layer in expand_ids(group["layers"])}


def local_size(entry: dict[str, Any], axes: dict[str, int], which: str = "weights") -> int:
    """Numbers of an array on one rank; asserts that its spec is of its rank and divides its dims."""
    assert len(entry[which]) == len(entry["shape"])
    size = 1
    for dim, part in zip(entry["shape"], entry[which], strict=True):
        names = () if part is None else (part,) if isinstance(part, str) else part
        degree = 1
        for name in names:
            degree *= axes[name]
        assert dim % degree == 0
        size *= dim // degree
    used = [name for part in entry[which] for name in ((part,) if isinstance(part, str) else part or ())]
    assert len(used) == len(set(used))
    return size
