"""The loop over batches, modalities and layers: one spectrum each, added to what is known already."""

import hashlib
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmplan.errors import InputError, MmplanError
from mmplan.runtime.ghost.model import saved_buffers
from mmplan.runtime.hessian.diagnose import first_unsound, lacks_derivative, require_twice, without_derivative
from mmplan.runtime.hessian.differences import difference
from mmplan.runtime.hessian.hutchinson import trace
from mmplan.runtime.hessian.lanczos import lanczos
from mmplan.runtime.hessian.products import Curvature, targets_of
from mmplan.runtime.hessian.settings import Settings
from mmplan.runtime.hessian.subject import Piece, Subject
from mmplan.runtime.hessian.values import Key, Value, Values

OnValue = Callable[[Key, Value], None]


def wanted_layers(subject: Subject, settings: Settings) -> dict[str, tuple[nn.Parameter, ...]]:
    """The layers to measure with the parameters that count: all, or without frozen ones. Asked before `measure`, which
    lets gradients reach frozen parameters.

    Raises:
        InputError: nothing is left.
    """
    layers = {}
    for layer, parameters in subject.layers.items():
        is_left_out = settings.skip_frozen and layer in subject.frozen
        kept = tuple(p for p in parameters if p.requires_grad or not settings.skip_frozen)
        if kept and not is_left_out and (not settings.layers or layer in settings.layers):
            layers[layer] = kept
    lost = [layer for layer in settings.layers if layer not in layers]
    if lost and lost[0] not in subject.layers:
        raise InputError(f"--layers: '{lost[0]}' has no parameters of its own, and a sensitivity is of parameters")
    if lost:
        raise InputError(f"--layers: '{lost[0]}' is frozen, and --skip-frozen leaves it out")
    if not layers:
        raise InputError("--skip-frozen leaves no layer: all of them are frozen")
    return layers


def weights_digest(subject: Subject) -> str:
    """SHA-256 of all parameters and saved buffers with their names."""
    digest = hashlib.sha256()
    tensors: dict[str, Tensor] = dict(subject.model.named_parameters()) | saved_buffers(subject.model)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def measure(
    subject: Subject,
    layers: Mapping[str, Sequence[nn.Parameter]],
    settings: Settings,
    values: Values,
    on_value: OnValue,
) -> None:
    """Measure what `values` lacks. Collective where processes are joined: they share the forwards of each batch.

    Raises:
        InputError: a loss is no number, or an operator has no second derivative.
    """
    for parameter in subject.model.parameters():
        parameter.requires_grad_(False)
    begun = {(key.layer, key.modality) for key in values.known}
    for number in range(settings.seeds * settings.batches):
        keys = [Key(number, m, layer) for layer in layers for m in subject.branches[layer]]
        if all(key in values.known for key in keys):
            continue
        pieces = subject.batch(number)
        alike: dict[tuple[str, frozenset[int]], Value] = {}  # branches of the same samples have the same values
        for modality in dict.fromkeys(key.modality for key in keys):
            chosen = {place: piece for place, piece in enumerate(pieces) if modality in piece.modalities}
            if not any(targets_of([*chosen.values()]).values()):
                continue  # the batch has nothing of it
            for layer, parameters in layers.items():
                key, same = Key(number, modality, layer), (layer, frozenset(chosen))
                if modality not in subject.branches[layer]:
                    continue
                if key in values.known:
                    alike.setdefault(same, values.known[key])
                    continue
                if same not in alike:
                    is_first = (layer, modality) not in begun
                    alike[same] = measure_one(subject, parameters, [*chosen.values()], settings, key, check=is_first)
                begun.add((layer, modality))
                values.add(key, alike[same])
                on_value(key, alike[same])


def measure_one(
    subject: Subject,
    parameters: Sequence[nn.Parameter],
    pieces: Sequence[Piece],
    settings: Settings,
    key: Key,
    *,
    check: bool,
) -> Value:
    """The spectrum of one layer over the pieces of one branch; `check`: against differences of gradients too."""
    started_s = time.perf_counter()
    generator = torch.Generator().manual_seed(zlib.crc32(f"{key.batch}/{key.layer}".encode()))
    with curvature_of(subject, parameters, pieces, settings, key) as matrix:
        if check:
            require_twice(matrix.first_gradients())
        start = torch.randn(matrix.size, generator=generator).to(subject.device)
        found = lanczos(matrix, start, iterations=settings.iterations, tolerance=settings.tolerance)
        estimate = None
        if settings.trace:
            estimate = trace(matrix, matrix.size, settings.trace, generator, start)
        doubt = None
        if check and not settings.gauss_newton:
            doubt = difference(matrix, parameters, found.vector, found.largest)
        return Value(
            largest=found.largest,
            least=found.least,
            residual=found.residual,
            iterations=found.iterations,
            converged=found.converged,
            loss=matrix.loss,
            trace=estimate,
            difference=doubt,
            seconds=time.perf_counter() - started_s,
        )


@contextmanager
def curvature_of(
    subject: Subject, parameters: Sequence[nn.Parameter], pieces: Sequence[Piece], settings: Settings, key: Key
) -> Iterator[Curvature]:
    """The Hessian of a layer, whose parameters alone require gradients meanwhile; what fails inside is explained."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    own = pieces[rank::world]
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        matrix = Curvature(
            own,
            targets_of(pieces),
            parameters,
            gauss_newton=settings.gauss_newton,
            keep=not settings.recompute,
            total=_summed if world > 1 else _alone,
        )
        if not math.isfinite(matrix.loss):
            where = next((text for piece in own if (text := first_unsound(subject.model, piece.run))), "")
            raise InputError(f"the loss of batch {key.batch} ({key.modality}) is {matrix.loss}{where}")
        yield matrix
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"out of memory at '{key.layer}': give --recompute, a smaller --microbatch or fewer --iterations"
        ) from error
    except ArithmeticError as error:
        raise InputError(
            f"the loss of batch {key.batch} ({key.modality}) has no finite second derivative by the parameters of "
            f"'{key.layer}', while it is finite itself: look for the root, the norm or the power of a zero"
        ) from error
    except MmplanError:
        raise
    except RuntimeError as error:
        if not lacks_derivative(error) or not own:
            raise
        raise InputError(without_derivative(subject.model, own[0].run, error)) from error
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)


def _alone(tensor: Tensor) -> Tensor:
    return tensor


def _summed(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor)
    return tensor
