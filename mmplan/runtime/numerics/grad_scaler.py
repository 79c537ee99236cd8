"""Loss scaling with one scale per modality, by the API of torch.amp.GradScaler.

    scaler = ModalityGradScaler(model, {"vision": model.vision, "audio": model.audio})
    scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()

In fp16 a vision tower's gradients may be a thousand times smaller than a language model's, and one scale serves
neither. Here hooks at the modules' inputs and outputs change the scale of gradients that pass (`boundary.py`), so that
each parameter's gradient, that of a shared one too, carries one power of two, and unscaling is exact. A modality whose
gradients overflow misses that step and backs off, alone.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.utils.hooks import RemovableHandle

from mmplan.runtime.norms import wide
from mmplan.runtime.numerics.boundary import Border, Crossings, cross_parameters
from mmplan.runtime.numerics.collectives import Group, reduce_
from mmplan.runtime.numerics.loss_scale import (
    BACKOFF_FACTOR,
    GROWTH_FACTOR,
    GROWTH_INTERVAL,
    INIT_SCALE,
    LossScale,
    ScaleRule,
)
from mmplan.runtime.numerics.modality_parts import SHARED, Parts, part_of_parameters, tied_parameters
from mmplan.runtime.numerics.part_scales import FOUND, PASSED, SEEN, part_scales
from mmplan.runtime.numerics.sharing import held


class ModalityGradScaler:
    """Scales losses, and unscales gradients part by part.

    Args:
        model: the whole, or this rank's part of a pipeline.
        modalities: name -> module of it; it and the modules in it get and give tensors by calls, from wherever these
            come. Everything else is the part `shared`, and so is a parameter that several parts use. Or name ->
            parameters, where no module of this rank is the modality's border (a pipeline cut inside it): then the
            caller lets tensors pass by `cross`.
        group: all ranks that hold anything of the model; they agree on who overflowed. None: all processes.

    Raises:
        ValueError: scales or factors are no powers of two, a module belongs to two modalities or another scaler.
    """

    def __init__(
        self,
        model: nn.Module,
        modalities: Parts,
        *,
        init_scale: float = INIT_SCALE,
        growth_factor: float = GROWTH_FACTOR,
        backoff_factor: float = BACKOFF_FACTOR,
        growth_interval: int = GROWTH_INTERVAL,
        enabled: bool = True,
        group: Group = None,
    ) -> None:
        if SHARED in modalities:
            raise ValueError(f"'{SHARED}' is the name of what is no modality's alone")
        rule = ScaleRule(growth_factor=growth_factor, backoff_factor=backoff_factor, growth_interval=growth_interval)
        self._model, self._group, self._enabled = model, group, enabled
        self._parts = {name: own if isinstance(own, nn.Module) else tuple(own) for name, own in modalities.items()}
        self._scales = part_scales((*self._parts, SHARED), init_scale, rule)
        self._agreed: dict[int, Tensor] = {}  # by optimizer: [parts, 5] of 0 and 1
        self._stepped: set[int] = set()  # optimizers, since the last update
        self._hooks: list[RemovableHandle] = []
        if enabled:
            self._attach()

    def _attach(self) -> None:
        tied_parts = tied_parameters(self._model, self._parts)
        for part, own in self._parts.items():
            if isinstance(own, nn.Module):
                self._hooks += Border(own, self._passing(SHARED, part), self._passing(part, SHARED)).watch()
        for tied in tied_parts:
            self._hooks += cross_parameters(tied.owner, tied.names, self._passing(SHARED, tied.modality))

    def remove(self) -> None:
        """Take the hooks off the model, for another scaler."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _passing(self, source: str, target: str) -> Any:
        return lambda x: self.cross(x, source, target)

    def cross(self, x: Tensor, source: str, target: str) -> Tensor:
        """`x`, computed in one part and used in another; its gradient changes scale on the way back."""
        return self._scales.cross(x, source, target) if self._enabled else x

    def scale(self, outputs: Any, modality: str = SHARED) -> Any:
        """A loss, or several, times the scale; `modality`: the part in which it was computed."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            return wide(outputs) * self.get_scale(modality)
        if isinstance(outputs, Mapping):
            return {name: self.scale(output, modality) for name, output in outputs.items()}
        if isinstance(outputs, Iterable) and not isinstance(outputs, str):
            scaled = (self.scale(output, modality) for output in outputs)
            return tuple(scaled) if isinstance(outputs, tuple) else list(scaled)
        raise ValueError(f"outputs must be tensors, or an iterable or mapping of them, not {type(outputs).__name__}")

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by their scales; collective. `step` does it if it is not done before.

        Raises:
            RuntimeError: done already since the last `update`.
            ValueError: a gradient is fp16 (it could not hold the result).
        """
        if not self._enabled:
            return
        if id(optimizer) in self._agreed:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update()")
        device = next(p.device for group in optimizer.param_groups for p in group["params"])
        largest: dict[str, Tensor] = {}
        for part, gradients in self._gradients(optimizer).items():
            largest[part] = get_total_norm(gradients, torch.inf).to(device)
            torch._foreach_mul_(gradients, 1 / self._scales.of[part].scale)
        self._agreed[id(optimizer)] = reduce_(self._scales.flags(largest, device), self._group, largest=True)

    def _gradients(self, optimizer: torch.optim.Optimizer) -> dict[str, list[Tensor]]:
        """What this rank holds of them, by part."""
        part_of = part_of_parameters(self._model, self._parts)
        by_part: dict[str, list[Tensor]] = {}
        for parameter in _with_gradients(optimizer):
            assert parameter.grad is not None
            if parameter.grad.dtype == torch.float16:
                raise ValueError(
                    f"a gradient {tuple(parameter.shape)} is fp16, which cannot hold what unscaling leaves: "
                    "keep weights in fp32 under autocast, or gradients in fp32"
                )
            values = held(parameter.grad)
            if values.numel():
                by_part.setdefault(part_of.get(parameter, SHARED), []).append(values)
        return by_part

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """`optimizer.step()` without the parameters whose part overflowed; not called if none are left.

        Raises:
            RuntimeError: done already since the last `update`, or a closure is given.
            ValueError: a modality has gradients whose scale is not known: its module was not called as a module.
        """
        if "closure" in kwargs or args:
            raise RuntimeError("closures are not supported: they would have to be scaled inside")
        if not self._enabled:
            return optimizer.step(**kwargs)
        if id(optimizer) in self._stepped:
            raise RuntimeError("step() has already been called on this optimizer since the last update()")
        if id(optimizer) not in self._agreed:
            self.unscale_(optimizer)
        self._stepped.add(id(optimizer))
        agreed = dict(zip(self._scales.of, self._agreed[id(optimizer)].bool().tolist(), strict=True))
        for part, own in self._parts.items():
            if isinstance(own, nn.Module) and agreed[part][SEEN] and not agreed[part][PASSED]:
                raise ValueError(
                    f"parameters of '{part}' have gradients, but no output of its modules passed: call these as "
                    "modules, or give the parameters and use `cross`"
                )
        overflowed = {part for part, flags in agreed.items() if flags[FOUND]}
        part_of = part_of_parameters(self._model, self._parts) if overflowed else {}
        parameters = _with_gradients(optimizer)
        missing = [(p, p.grad) for p in parameters if overflowed and part_of.get(p, SHARED) in overflowed]
        if missing and len(missing) == len(parameters):
            return None
        for parameter, _ in missing:
            parameter.grad = None
        result = optimizer.step(**kwargs)
        for parameter, gradient in missing:
            parameter.grad = gradient
        return result

    def update(self, new_scale: float | Mapping[str, float] | None = None) -> None:
        """Move the scales by what the steps since the last update found, or set them.

        A part is to blame for an overflow that began in it. One without gradients in these steps keeps its scale.

        Raises:
            RuntimeError: no gradients were looked at since the last update.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            given = new_scale if isinstance(new_scale, Mapping) else dict.fromkeys(self._scales.of, new_scale)
            new = {part: LossScale(scale=float(scale)) for part, scale in given.items() if self._known(part)}
            self._scales.of |= new
            self._scales.crossings = Crossings()
        elif not self._agreed:
            raise RuntimeError("no gradients were unscaled since the last update()")
        else:
            self._scales.move(torch.stack([flags.cpu() for flags in self._agreed.values()]).amax(0))
        self._agreed.clear()
        self._stepped.clear()

    def _known(self, part: str) -> bool:
        if part not in self._scales.of:
            raise ValueError(f"no modality '{part}': there are {', '.join(self._scales.of)}")
        return True

    def get_scale(self, modality: str = SHARED) -> float:
        """Of a part; without one, what `scale` multiplies a loss by."""
        self._known(modality)
        return self._scales.of[modality].scale if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        return self._scales.rule.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        self._scales.rule = replace(self._scales.rule, growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        return self._scales.rule.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        self._scales.rule = replace(self._scales.rule, backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        return self._scales.rule.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        self._scales.rule = replace(self._scales.rule, growth_interval=new_interval)

    def is_enabled(self) -> bool:
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """Keys of torch's; scales and trackers by part. Empty if disabled."""
        if not self._enabled:
            return {}
        return {
            **self._scales.state(),
            "growth_factor": self._scales.rule.growth_factor,
            "backoff_factor": self._scales.rule.backoff_factor,
            "growth_interval": self._scales.rule.growth_interval,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Of this class, or of torch.amp.GradScaler: its one scale becomes that of every part.

        Raises:
            RuntimeError: the state is empty, as of a disabled scaler.
            ValueError: it is of other modalities.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError("the state is empty, perhaps saved from a disabled scaler")
        scales, trackers = (
            one if isinstance(one, Mapping) else dict.fromkeys(self._scales.of, one)
            for one in (state_dict["scale"], state_dict["_growth_tracker"])
        )
        rule = {name: state_dict[name] for name in ("growth_factor", "backoff_factor", "growth_interval")}
        self._scales.load(scales, trackers)
        self._scales.rule = ScaleRule(**rule)


def _with_gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
