"""What each of four processes finds out about tensors laid on a mesh."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from case_processes import meeting
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from mmplan.runtime.network import all_to_all
from mmplan.runtime.ragged_rows import place_rows, pool_rows
from mmplan.runtime.row_cuts import Ragged
from mmplan.runtime.shard_tensor import RaggedShard, shard_tensor

PROCESSES = 4
LENGTHS = (7, 1, 0, 12, 3, 5, 2)  # patches of seven images
SPECS = {
    "samples": (Ragged("samples"),),
    "tokens": (Ragged("tokens"),),
    "rows": (Ragged((0, 21, 1, 8)),),
    "chunks": (Shard(0),),
    "columns": (Shard(1),),
    "whole": (Replicate(),),
}
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn)


def patches(dtype: torch.dtype = torch.float32, width: int = 6) -> Tensor:
    x = torch.randn(sum(LENGTHS), width, generator=torch.Generator().manual_seed(0)) * 3
    return x > 0 if dtype == torch.bool else x.to(dtype)


def shard(x: Any, mesh: DeviceMesh, spec: Any, **more: Any) -> Any:
    return shard_tensor(x, mesh, spec, modality="vision", **more)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def round_trips(mesh: DeviceMesh) -> dict[str, bool]:
    found = {}
    for name, spec in SPECS.items():
        for dtype in DTYPES if isinstance(spec[0], Ragged) else DTYPES[:3]:  # gloo carries no bytes for a DTensor
            x = patches(dtype)
            found[f"{name} {dtype}"] = same(shard(x, mesh, spec, lengths=LENGTHS).full_tensor(), x)
    empty = shard(torch.zeros(0, 6), mesh, (Ragged("tokens"),), lengths=())
    found["no samples"] = empty.full_tensor().shape == (0, 6) and empty.local.shape == (0, 6)
    images = [torch.randn(rows, 2, 3, generator=torch.Generator().manual_seed(rows)) for rows in LENGTHS]
    found["list"] = same(shard(images, mesh, (Ragged("tokens"),)).full_tensor(), torch.cat(images))
    return found


def moves(mesh: DeviceMesh) -> dict[str, bool]:
    x = patches()
    found = {}
    for source in ("samples", "tokens", "rows"):
        for target, spec in SPECS.items():
            direct, moved = shard(x, mesh, spec, lengths=LENGTHS), shard(x, mesh, SPECS[source], lengths=LENGTHS)
            moved = moved.redistribute(spec)
            local = [t.local if isinstance(t, RaggedShard) else t.to_local() for t in (direct, moved)]
            found[f"{source} to {target}"] = (
                same(*local) and type(direct) is type(moved) and same(moved.full_tensor(), x)
            )
    chunks = shard(x, mesh, SPECS["chunks"])
    found["DTensor to tokens"] = same(
        shard(chunks, mesh, SPECS["tokens"], lengths=LENGTHS).local,
        shard(x, mesh, SPECS["tokens"], lengths=LENGTHS).local,
    )
    return found


def gradients(mesh: DeviceMesh) -> dict[str, float]:
    """Errors of gradients of sum(w * f(x)), against those of x in one piece."""
    weights = patches().roll(1, 0)
    found = {}
    for source, target in (("tokens", None), ("tokens", "samples"), ("rows", "chunks"), ("samples", "columns")):
        x = patches().requires_grad_()
        laid = shard(x, mesh, SPECS[source], lengths=LENGTHS)
        laid = laid if target is None else laid.redistribute(SPECS[target])
        (weights * laid.full_tensor().sin()).sum().backward()
        assert x.grad is not None
        found[f"{source} to {target}"] = float((x.grad - weights * patches().cos()).abs().max())
    x = patches().requires_grad_()  # own queries against all keys: each rank has a part of the gradient
    laid = shard(x, mesh, SPECS["tokens"], lengths=LENGTHS)
    (laid.local @ laid.full_tensor(partial_gradients=True).T).square().sum().backward()
    whole = patches().requires_grad_()
    (whole @ whole.T).square().sum().backward()
    assert x.grad is not None and whole.grad is not None
    found["attention"] = float((x.grad - whole.grad).abs().max() / whole.grad.abs().max())
    return found


TEXT, PLACES = (1024, 1024), (450, 1400)  # two texts, and where the features of an image of 197 tokens stand in them
FRAMES, STRIDE = (130, 126, 129, 127), 4  # of a clip of 512 frames on four ranks


def placed(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Two encoders' 197 x 1024 tokens at their places among 2048 x 1024 rows on four ranks, and back."""
    own = torch.randn(197 if rank < 2 else 0, 1024, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    lengths = (197,) if rank < 2 else ()
    features = shard_tensor(own, mesh, (Ragged("held"),), modality="vision", lengths=lengths)
    weights = torch.randn(sum(TEXT), 1024, generator=torch.Generator().manual_seed(9))
    with patch("mmplan.runtime.row_exchange.all_to_all", side_effect=all_to_all) as exchange:
        rows = place_rows(features, PLACES, TEXT, (512,) * 4, modality="text")
        (weights[rank * 512 : rank * 512 + 512] * rows.local.sin()).sum().backward()
    images = [torch.randn(197, 1024, generator=torch.Generator().manual_seed(one)) for one in (0, 1)]
    expected = torch.zeros(sum(TEXT), 1024)
    for first, image in zip(PLACES, images, strict=True):
        expected[first : first + 197] = image
    gradient = weights[PLACES[rank] : PLACES[rank] + 197] * own.detach().cos() if rank < 2 else own
    assert own.grad is not None
    return {
        "exact": same(rows.full_tensor().detach(), expected) and rows.lengths == TEXT and rows.modality == "text",
        "gradient": float((own.grad - gradient).abs().max()) if rank < 2 else 0.0,
        "sent_bytes": [call.args[1].nbytes for call in exchange.call_args_list],
        "refusals": [
            refused(lambda firsts=firsts: place_rows(features, firsts, TEXT, (512,) * 4, modality="text"))
            for firsts in ((450,), (450, 600), (450, 1900))
        ],
    }


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def pooled(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """512 frames pooled with stride 4 where cuts go through groups, and samples of unlike lengths."""
    frames = torch.randn(sum(FRAMES), 32, generator=torch.Generator().manual_seed(0))
    own, clip = frames.clone().requires_grad_(), frames.clone().requires_grad_()
    expected = clip.view(-1, STRIDE, 32).mean(1)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (weights * expected.sin()).sum().backward()
    laid = shard_tensor(own, mesh, (Ragged(FRAMES),), modality="audio")
    with patch("mmplan.runtime.row_exchange.all_to_all", side_effect=all_to_all) as exchange:
        groups = pool_rows(laid, STRIDE)
        here = slice(*groups.offsets[rank : rank + 2])
        (weights[here] * groups.local.sin()).sum().backward()
    assert own.grad is not None and clip.grad is not None
    uneven = pool_rows(shard(patches(), mesh, SPECS["rows"], lengths=LENGTHS), 3)
    means = [x[: len(x) // 3 * 3].view(-1, 3, 6).mean(1) for x in patches().split(LENGTHS)]
    return {
        "local": tuple(groups.local.shape),
        "error": float((groups.full_tensor() - expected).abs().max()),
        "gradient": float((own.grad - clip.grad).abs().max()),
        "sent_bytes": [call.args[1].nbytes for call in exchange.call_args_list],
        "uneven": float((uneven.full_tensor() - torch.cat(means)).abs().max()),
        "uneven lengths": uneven.lengths,
    }


def two_axes(mesh: DeviceMesh) -> dict[str, Any]:
    x = patches().requires_grad_()
    laid = shard(x, mesh, (Ragged("tokens"), Shard(1)), lengths=LENGTHS)
    weights = patches().roll(2, 0)
    (weights * laid.full_tensor().sin()).sum().backward()
    assert x.grad is not None
    turned = laid.redistribute((Shard(1), Ragged("tokens")))
    regular = laid.redistribute((Shard(0), Shard(1)))
    return {
        "local": tuple(laid.local.shape),
        "exact": same(laid.full_tensor().detach(), patches()) and same(turned.full_tensor().detach(), patches()),
        "regular": isinstance(regular, DTensor) and same(regular.full_tensor().detach(), patches()),
        "gradient": float((x.grad - weights * patches().cos()).abs().max()),
    }


def held(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    own = torch.full((rank * 2, 3), float(rank)).requires_grad_()
    laid = shard(own, mesh, (Ragged("held"),), lengths=(rank, rank))
    (laid.full_tensor() * torch.arange(12.0).unsqueeze(1)).sum().backward()
    even = laid.redistribute((Ragged("tokens"),))
    assert own.grad is not None
    return {
        "offsets": laid.offsets,
        "lengths": laid.lengths,
        "whole": laid.full_tensor().detach()[:, 0].tolist(),
        "gradient": own.grad[:, 0].tolist(),
        "even": even.own_lengths,
    }


def refusals(rank: int, mesh: DeviceMesh, square: DeviceMesh) -> dict[str, str]:
    x = patches()
    wrong: dict[str, Any] = {
        "placements": lambda: shard(x, square, (Shard(0),)),
        "sum": lambda: shard(x, mesh, (Ragged((1, 2, 3, 4)),)),
        "counts": lambda: shard(x, mesh, (Ragged((15, 15)),)),
        "lengths": lambda: shard(x, mesh, (Ragged("tokens"),), lengths=(7, 8)),
        "two": lambda: shard(x, square, (Ragged("tokens"), Ragged("tokens"))),
        "rows twice": lambda: shard(x, square, (Ragged("tokens"), Shard(0))),
        "dim": lambda: shard(x, mesh, (Shard(2),)),
        "partial": lambda: shard(x, mesh, (Partial(),)),
        "modality": lambda: shard_tensor(x, mesh, (Shard(0),), modality="vison"),  # type: ignore[arg-type]
        "features": lambda: shard([x, x[:, :2]], mesh, (Ragged("tokens"),)),
        "unlike ranks": lambda: shard(x if rank != 2 else x[:, :2], mesh, (Ragged("held"),)),
        "held": lambda: shard(x, mesh, (Ragged("tokens"),)).redistribute((Ragged("held"),)),
        "cut": lambda: shard(x, mesh, (Ragged("pixels"),)),  # type: ignore[arg-type]
        "scalar": lambda: shard(torch.tensor(1.0), mesh, (Replicate(),)),
    }
    found = {}
    for name, call in wrong.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    return found


def run_shard_tensor_cases(rank: int, folder: str) -> None:
    """Body of one of the processes; writes its results to `folder`."""
    with meeting(rank, folder, PROCESSES) as results:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = patches()
        results |= {
            "own": {n: shard(x, mesh, SPECS[n], lengths=LENGTHS).own_lengths for n in ("samples", "tokens", "rows")},
            "round_trips": round_trips(mesh),
            "moves": moves(mesh),
            "gradients": gradients(mesh),
            "two_axes": two_axes(square),
            "placed": placed(rank, mesh),
            "pooled": pooled(rank, mesh),
            "held": held(rank, mesh),
            "refusals": refusals(rank, mesh, square),
        }
