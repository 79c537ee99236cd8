"""Names of what runs, for profilers: an NVTX range per action, `vision stage 0 F microbatch 3`, on CUDA."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache

import torch

from mmplan.planner.program import Action


@contextmanager
def action_range(action: Action, modalities: Mapping[int, str], device: torch.device) -> Iterator[None]:
    """A range around the action's host side; nothing elsewhere than on CUDA.

    Kernels of a backward are launched by autograd's own thread: profilers show them beside the range, not in it.
    """
    if device.type != "cuda" or not _named():
        yield
        return
    torch.cuda.nvtx.range_push(range_name(action, modalities))  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


@lru_cache(maxsize=1)
def _named() -> bool:
    """Whether this build of torch has NVTX; a run must not end because it has not."""
    try:
        torch.cuda.nvtx.mark("mmplan")  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


def range_name(action: Action, modalities: Mapping[int, str]) -> str:
    """Modality, stage, kind and microbatch, as far as the action has them; of a sum over stages its number."""
    words = [modalities.get(action.stage, ""), f"stage {action.stage}", action.kind]
    number = str(action.microbatch) if action.kind == "TIE" else f"microbatch {action.microbatch}"
    words += [number] if action.microbatch >= 0 else []
    return " ".join(word for word in words if word)
