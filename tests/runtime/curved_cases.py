"""Small models whose Hessians are known in full: a subject, and the dense matrix of a layer by torch.func alone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from unittest import mock

import torch
import torch.nn.functional as F
from expert_models import text_only
from layer_zoo import FULL, LLM, llava, qwen_vl, scenario_of
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmplan.runtime.hessian.own_scenario import scenario_subject
from mmplan.runtime.hessian.products import Curvature, targets_of
from mmplan.runtime.hessian.subject import Subject
from mmplan.runtime.norms import RMS_NORM_EPS
from mmplan.scenario.scenario import Moe, Sample, Scenario

SIZE = (6, 6)  # of an image: three by three patches
SAMPLES = (
    Sample(text_tokens=7, images=(SIZE,)),
    Sample(text_tokens=5),
    Sample(text_tokens=6, images=(SIZE, SIZE)),
)
SMALL = replace(LLM, hidden=12, heads=2, kv_heads=1, head_dim=4, ffn=16)
SMALL_EXPERTS = Moe(experts=3, topk=2, expert_ffn=4)
QWEN_SAMPLES = (Sample(text_tokens=7, images=((8, 8),)), Sample(text_tokens=5))


def curved_scenario(name: str) -> Scenario:
    if name == "llava":
        return scenario_of(llava(FULL, FULL, FULL), samples=SAMPLES)
    if name == "qwen":
        return scenario_of(qwen_vl(FULL, FULL, FULL), samples=QWEN_SAMPLES)
    shape = SMALL if name == "llm" else replace(SMALL, hidden=8, ffn=8, moe=SMALL_EXPERTS, qk_norm=True)
    return scenario_of(text_only(shape), samples=(Sample(text_tokens=9), Sample(text_tokens=6)))


def curved_subject(name: str) -> Subject:
    scenario = curved_scenario(name)
    count = len(scenario.data.manifest)
    return scenario_subject(scenario, weights=None, samples=count, microbatch=None, device=torch.device("cpu"))


def curvature(subject: Subject, layer: str, modality: str, *, gauss_newton: bool = False) -> Curvature:
    pieces = [piece for piece in subject.batch(0) if modality in piece.modalities]
    for parameter in subject.model.parameters():
        parameter.requires_grad_(False)
    for parameter in subject.layers[layer]:
        parameter.requires_grad_(True)
    return Curvature(pieces, targets_of(pieces), subject.layers[layer], gauss_newton=gauss_newton)


def loss_of_layer(subject: Subject, layer: str, modality: str) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The branch's loss as a function of a flat vector of the layer's parameters, and where it stands."""
    pieces = [piece for piece in subject.batch(0) if modality in piece.modalities]
    targets = targets_of(pieces)
    owners = _owners(subject.model, subject.layers[layer])
    sizes = [parameter.numel() for parameter in subject.layers[layer]]
    start = torch.cat([parameter.detach().reshape(-1) for parameter in subject.layers[layer]])

    def loss(flat: Tensor) -> Tensor:
        before = [getattr(module, name) for module, name in (pair for own in owners for pair in own)]
        parts = torch.split(flat, sizes)
        for own, part, parameter in zip(owners, parts, subject.layers[layer], strict=True):
            for module, name in own:
                del module._parameters[name]
                setattr(module, name, part.view_as(parameter))
        try:
            with sdpa_kernel(SDPBackend.MATH), _torch_alone():
                total = torch.zeros(())
                for piece in pieces:
                    for which, value in piece.run().losses.items():
                        total = total + value / targets[which]
                return total
        finally:
            for (module, name), parameter in zip((pair for own in owners for pair in own), before, strict=True):
                delattr(module, name)
                module.register_parameter(name, parameter)

    return loss, start


def dense_hessian(subject: Subject, layer: str, modality: str, *, by_loops: bool = False) -> Tensor:
    """[n, n] by forward over reverse mode, or where Python reads values (experts) by autograd's own loop."""
    loss, start = loss_of_layer(subject, layer, modality)
    for parameter in subject.model.parameters():
        parameter.requires_grad_(False)
    with torch.no_grad():
        loss(start)  # fills the tables of angles, which must not be made inside a transform
    if by_loops:
        matrix: Tensor = torch.autograd.functional.hessian(loss, start)
    else:
        matrix = torch.func.jacrev(torch.func.grad(loss), chunk_size=256)(start)
    return matrix.detach()


def ends(matrix: Tensor) -> tuple[float, float]:
    values = torch.linalg.eigvalsh(matrix.double())
    return float(values[0]), float(values[-1])


@contextmanager
def _torch_alone() -> Iterator[None]:
    """Norms are torch's, and parameters may be tensors."""
    with (
        mock.patch("mmplan.runtime.norms.rms_norm", _torch_rms_norm),
        mock.patch.object(nn.Module, "get_parameter", lambda module, name: attrgetter(name)(module)),
    ):
        yield


def _torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Torch's own, so that the function of mmplan is held against it; also, torch.func cannot enter that one."""
    return F.rms_norm(x, (x.shape[-1],), weight, RMS_NORM_EPS)


def _owners(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[list[tuple[nn.Module, str]]]:
    """Where each parameter stands; a tied one in several places."""
    return [
        [
            (module, name)
            for module in model.modules()
            for name, own in list(module._parameters.items())
            if own is parameter
        ]
        for parameter in parameters
    ]
