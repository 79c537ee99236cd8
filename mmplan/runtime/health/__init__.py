"""Training health for any PyTorch loop: `from mmplan.runtime import health; health.attach(model, ...)`.

Names are loaded when they are first used, so that reading a file of readings needs no torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "attach": "mmplan.runtime.health.hooks",
    "Groups": "mmplan.runtime.health.groups",
    "Ledger": "mmplan.runtime.health.staleness",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mmplan.runtime.health' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)
