"""Monitors that run a forward again: the way of an overflow, and robustness against noise on the image embeddings."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmplan.runtime.health import overflow, robustness
from mmplan.runtime.health.contributions import unsound_gradients
from mmplan.runtime.health.groups import summed
from mmplan.runtime.health.judge import Value
from mmplan.runtime.health.overflow import Trace, tensors_of, tracing
from mmplan.runtime.health.placed import local, whole
from mmplan.runtime.health.places import modality_of, module_at
from mmplan.runtime.health.replay import Call
from mmplan.runtime.health.settings import Settings

_SHOWN = 12  # modules of a path


def overflow_values(model: nn.Module, call: Call, settings: Settings, seed: float, *, backward: bool) -> list[Value]:
    """The first module at which a number was none, by running the same step again.

    Args:
        seed: the gradient of the loss that the step began its backward with: its loss scale.
        backward: also run that again; not where backwards talk to other ranks.
    """
    with tracing(model) as trace, torch.enable_grad():
        output = call.run(model)
        loss = next((t for t in _losses(output) if t.requires_grad), None)
        if not trace.origin and backward and loss is not None:
            trained = [p for p in model.parameters() if p.requires_grad]
            torch.autograd.grad(loss, trained, torch.full_like(loss, seed), allow_unused=True)
    if not trace.origin:  # not seen at a module's output: the gradient of a weight, or the loss itself
        wrong = unsound_gradients(model)
        if not wrong and all(overflow.is_finite(t) for t in _losses(output)):
            return []
        last = wrong[-1].rpartition(".")[0] if wrong else "loss"
        trace = Trace(origin=last, because="backward" if wrong else "forward", what="Inf or NaN", path=wrong[:_SHOWN])
    modality = modality_of(trace.origin, settings.places)
    detail: dict[str, float | str | None] = {
        "modality": modality,
        "because": trace.because,
        "what": trace.what,
        "path": " > ".join((trace.origin, *trace.path[:_SHOWN])),
    }
    return [Value(overflow.RULE.monitor, trace.origin, float(1 + len(trace.path)), detail, known="rank")]


def robustness_values(model: nn.Module, call: Call, settings: Settings, step: int) -> list[Value]:
    """KL of the text output with and without noise on the embeddings of the first modality of `embeddings`."""
    modality, path = next(iter(settings.embeddings.items()))
    path = settings.branches.get(modality, path)
    module = module_at(model, path, optional=True)
    if module is None or settings.groups.stages is not None:  # no rank has the way from the image to the text output
        return []
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(step)
    relative: list[float] = []

    def shake(module: nn.Module, args: Any, output: Any) -> Any:
        clean = next(tensors_of(output), None)
        if clean is None:
            return output
        relative.append(float(robustness.NOISE_VARIANCE**0.5 / local(clean).float().square().mean().sqrt()))
        return _with_first(output, robustness.perturbed(clean, generator))

    with torch.no_grad():
        clean = logits_of(call.run(model), settings)
        if clean is None:
            return []
        handle = module.register_forward_hook(settings.hook(shake))
        try:
            shaken = logits_of(call.run(model), settings)
        finally:
            handle.remove()
    own = [0.0, 0.0, 0.0]  # of a replica without images in its last forward
    if shaken is not None and relative:
        own = [float(robustness.output_divergence(clean, shaken)), relative[0], 1.0]
    divergence, noise, ranks = summed(own, settings.groups.replicas)
    if not ranks:
        return []
    return [Value(robustness.RULE.monitor, modality, divergence / ranks, {"noise_over_embedding": noise / ranks})]


def logits_of(output: Any, settings: Settings) -> Tensor | None:
    if settings.logits is not None:
        return settings.logits(output)
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return whole(found) if isinstance(found, Tensor) else None


def _losses(output: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_of(output) if tensor.numel() == 1]


def _with_first(output: Any, tensor: Tensor) -> Any:
    """A module's result with its first tensor replaced."""
    if isinstance(output, Tensor):
        return tensor
    if isinstance(output, tuple):
        return (tensor, *output[1:])
    if isinstance(output, dict):  # those of transformers too
        first = next(key for key, value in output.items() if isinstance(value, Tensor))
        return type(output)({**output, first: tensor})
    return output
