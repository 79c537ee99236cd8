"""Certified parallel plans for multimodal training.

The public API, loaded lazily so that `import mmplan` stays instant: each name is imported from the module
that owns it when it is first used.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "load_scenario": "mmplan.scenario.load",
    "build_graph": "mmplan.cost_models.build",
    "optimize": "mmplan.planner.search",
    "load_plan": "mmplan.planner.plan",
    "save_plan": "mmplan.planner.plan",
    "check_plan": "mmplan.planner.check",
    "simulate": "mmplan.planner.simulate",
    "compare": "mmplan.report.simulation",
    "execute": "mmplan.runtime.launch",
    "validate": "mmplan.runtime.validate",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mmplan' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)
