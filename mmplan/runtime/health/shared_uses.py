"""Gradients that the uses of one shared parameter send to it, told apart by views.

While a module runs, its shared parameter is replaced by a view of it: the gradient of the view is that of this use
alone, whatever the module does with it. With mitigation a use's gradient is scaled on its way back.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmplan.runtime.health.conflict import RULE, Conflict, scales, worst_conflict
from mmplan.runtime.health.groups import each
from mmplan.runtime.health.placed import local
from mmplan.runtime.health.places import SHARED, modality_of, module_at
from mmplan.runtime.health.replay import in_forward
from mmplan.runtime.health.settings import Settings


class SharedUses:
    """`sampling` keeps gradients; a parameter is shared where several modules hold it, or where its module is named as
    one that runs once for each modality."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self._settings = settings
        self.sampling = False
        self.clear()
        self._scales: dict[tuple[str, str], float] = {}
        self._calls: dict[str, int] = {}
        self._parameters: dict[str, Tensor] = {}
        self.handles: list[Any] = []
        for name, module, attributes in _sites(model, settings):
            several = _named(name, settings)
            before = settings.hook(self._borrow(name, attributes, several))
            after = settings.hook(self._give_back(attributes))
            self.handles.append(module.register_forward_pre_hook(before))
            # Before FSDP takes the whole parameters away again.
            self.handles.append(module.register_forward_hook(after, prepend=True, always_call=True))

    def clear(self) -> None:
        self.gradients: dict[str, dict[str, Tensor]] = {}

    def begin(self) -> None:
        """A new forward of the model: uses count from 0."""
        self._calls = {}

    def conflicts(self) -> Iterator[tuple[str, Conflict]]:
        """By parameter, with the gradients of all replicas; collective. Decides what the next steps scale."""
        for parameter, gradients in self._of_replicas().items():
            found = worst_conflict(gradients)
            if self._settings.mitigation is not None:
                limit = self._settings.rules.get(RULE.monitor, RULE).limit
                chosen = scales(found, list(gradients), limit, self._settings.mitigation)
                self._scales |= {(parameter, use): scale for use, scale in chosen.items()}
            if found is not None:
                yield parameter, found

    def _of_replicas(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Sums over replicas, some of which may not have had a use, such as one without images in this step."""
        group = self._settings.groups.replicas
        if group is None:
            return self.gradients
        parts = each({parameter: tuple(uses) for parameter, uses in self.gradients.items()}, group)
        summed: dict[str, dict[str, Tensor]] = {}
        for parameter, use in sorted({(name, use) for part in parts for name, uses in part.items() for use in uses}):
            gradient = self.gradients.get(parameter, {}).get(use)
            if gradient is None:
                gradient = torch.zeros_like(self._parameters[parameter])
            dist.all_reduce(local(gradient), group=group)
            summed.setdefault(parameter, {})[use] = gradient
        return summed

    def _borrow(self, name: str, attributes: Mapping[str, str], several: bool) -> Any:
        def replace(module: nn.Module, args: Any) -> None:
            if not in_forward() or not (self.sampling or self._settings.mitigation is not None):
                return
            call = self._calls.get(name, 0)
            self._calls[name] = call + 1
            modality = modality_of(name, self._settings.places)
            use = f"call {call}" if several else (name if modality == SHARED else modality)
            for attribute, parameter in attributes.items():
                own = module._parameters[attribute]
                # No parameter where somebody else has put a view there.
                if isinstance(own, nn.Parameter) and own.requires_grad:
                    view = own.view_as(own)
                    self._parameters[parameter] = own
                    view.register_hook(self._taken(parameter, use))  # type: ignore[no-untyped-call]
                    module.__dict__.setdefault("_mmplan_own", {})[attribute] = own
                    module._parameters[attribute] = view  # type: ignore[assignment]

        return replace

    def _give_back(self, attributes: Mapping[str, str]) -> Any:
        def restore(module: nn.Module, args: Any, output: Any) -> None:
            for attribute, own in module.__dict__.pop("_mmplan_own", {}).items():
                module._parameters[attribute] = own

        return restore

    def _taken(self, parameter: str, use: str) -> Any:
        def take(gradient: Tensor) -> Tensor | None:
            if self.sampling:
                sums = self.gradients.setdefault(parameter, {})
                sums[use] = sums[use] + gradient.detach() if use in sums else gradient.detach().clone()
            scale = self._scales.get((parameter, use), 1.0)
            return None if scale == 1.0 else gradient * scale

        return take


def _sites(model: nn.Module, settings: Settings) -> Iterator[tuple[str, nn.Module, dict[str, str]]]:
    """Modules with shared parameters: their name, and attribute -> name of the parameter."""
    holders: dict[int, list[tuple[str, str]]] = {}
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((name, attribute))
    for name, module in model.named_modules():
        attributes = {}
        for attribute, parameter in module._parameters.items():
            held = holders.get(id(parameter), [])
            if len(held) > 1 or (parameter is not None and _named(name, settings)):
                attributes[attribute] = ".".join(part for part in held[0] if part)
        if attributes:
            yield name, module, attributes
    for name in settings.shared:
        module_at(model, name, optional=settings.groups.stages is not None)


def _named(name: str, settings: Settings) -> bool:
    """Whether a module is, or lies in, one that is named as shared."""
    return any(f"{name}.".startswith(f"{path}.") for path in settings.shared)
