"""Where Inf or NaN began, and the path by which it spread.

A forward is run again with a look at every module's inputs, weights and output. The origin is the first module whose
output is no number although its inputs are; the path are the modules behind it that took it on, in their order. The
same goes for a backward, from the loss towards the inputs. `headroom` tells before it happens how near an output has
come to the largest number of its type (65,504 in fp16, 3.4e38 in bf16 and fp32).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmplan.runtime.health.placed import local
from mmplan.runtime.health.rule import Rule

RULE = Rule(
    monitor="overflow",
    metric="modules whose output or gradient is Inf or NaN although what went in was finite",
    unit="modules",
    limit=0.0,
    fires="above",
    source="by definition",
    advice="for fp16 lower the loss scale of this modality or compute this module in fp32 or bf16; look for a "
    "division, logarithm or root of zero there, and for weights that have grown",
    certainty=1.0,
    explains=(
        "overflow",  # of a later step
        *("loss", "drift", "jed", "cmrc", "robustness", "attention_collapse", "gradient_attenuation"),
        *("gradient_variance", "kv_shift", "shared_conflict"),
    ),
)
HEADROOM = Rule(
    monitor="headroom",
    metric="largest |output| of a module over the largest number of its type",
    unit="fraction",
    limit=0.5,
    fires="above",
    source="ours: one doubling before an overflow",
    advice="the next growth of this module's output overflows: compute it in bf16 or fp32, or normalise before it",
    certainty=0.6,
    explains=("loss",),
)


@dataclass(slots=True)
class Trace:
    """`origin`: the module where it began, "" where nothing was found; `because`: `weights`, `inputs`, `forward` or
    `backward`; `what`: Inf or NaN, and in which type; `path`: modules behind it, in the order in which they took it
    on."""

    origin: str = ""
    because: str = ""
    what: str = ""
    path: list[str] = field(default_factory=list)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Floating-point tensors of arguments or results, in containers too."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)


def is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(local(tensor)).all())


def told(tensor: Tensor) -> str:
    """NaN or Inf, and the type: `Inf in float16`."""
    kind = "NaN" if bool(torch.isnan(local(tensor)).any()) else "Inf"
    return f"{kind} in {str(tensor.dtype).removeprefix('torch.')}"


@contextmanager
def tracing(model: nn.Module) -> Iterator[Trace]:
    """Watch forwards of modules (those without children, which compute) and backwards through their outputs."""
    trace, readers, handles = Trace(), dict[Any, str](), []
    for name, module in leaves(model):
        handles.append(module.register_forward_hook(_watch(trace, readers, name), with_kwargs=True))
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def leaves(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that have no children; those with parameters of their own besides children count too."""
    for name, module in model.named_modules():
        own = next(iter(module.parameters(recurse=False)), None)
        if name and (own is not None or next(module.children(), None) is None):
            yield name, module


def _watch(trace: Trace, readers: dict[Any, str], name: str) -> Any:
    def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        outputs, inputs = list(tensors_of(output)), [*tensors_of(args), *tensors_of(kwargs)]
        for tensor in inputs:  # what stands between modules, such as a residual sum, is no module's output
            if tensor.requires_grad and tensor.grad_fn is not None and tensor.grad_fn not in readers:
                readers[tensor.grad_fn] = name
                tensor.register_hook(_watch_gradient(trace, readers, tensor.grad_fn, name))  # type: ignore[no-untyped-call]
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(  # type: ignore[no-untyped-call]
                    _watch_gradient(trace, readers, tensor.grad_fn, name)
                )
        bad = next((tensor for tensor in outputs if not is_finite(tensor)), None)
        if bad is None:
            return
        if trace.origin:
            if name not in trace.path:
                trace.path.append(name)
            return
        trace.origin, trace.what = name, told(bad)
        if any(not is_finite(parameter) for parameter in module.parameters(recurse=False)):
            trace.because = "weights"
        else:
            trace.because = "inputs" if any(not is_finite(tensor) for tensor in inputs) else "forward"

    return look


def _watch_gradient(trace: Trace, readers: Mapping[Any, str], made_by: Any, name: str) -> Any:
    """The first bad gradient stands at the output of a module; it began in the module that read this output."""

    def look(gradient: Tensor) -> None:
        if is_finite(gradient):
            return
        if not trace.origin:
            trace.origin = readers.get(made_by, name)
            trace.because, trace.what = "backward", told(gradient)
        if name != trace.origin and name not in trace.path:
            trace.path.append(name)

    return look


def bad_weights(tensors: Iterator[tuple[str, Tensor]]) -> list[tuple[str, str]]:
    """Names of weights that are no numbers, and what they are."""
    return [(name, told(t)) for name, t in tensors if t.is_floating_point() and not is_finite(t)]


def headroom(output: Tensor) -> Tensor:
    """Largest |x| over the largest number of the type, as a tensor that nobody has waited for."""
    largest = local(output).abs().amax().float() if output.numel() else torch.zeros(())
    return largest / torch.finfo(output.dtype).max
