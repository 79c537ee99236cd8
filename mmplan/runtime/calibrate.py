"""`mmplan calibrate`: measure the device at hand and write down what it reaches, with ranges and residuals."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import torch

from mmplan import __version__
from mmplan.cost_models.calibration import fit_device, fit_link
from mmplan.errors import InputError
from mmplan.runtime.link_benchmark import measure_links
from mmplan.runtime.microbenchmarks import OnProgress, extent, measure
from mmplan.scenario.catalogue import catalogue_device, catalogue_link, device_hint, device_names
from mmplan.scenario.driver_names import device_of_driver
from mmplan.scenario.profile import Profile


def calibrate(
    *,
    device: str | None = None,
    base: str | None = None,
    quick: bool = False,
    local: int | None = None,
    on_progress: OnProgress = lambda text: None,
) -> Profile:
    """The profile of a device; on a CPU of one core, as a process of a run has it.

    Args:
        device: `cpu` or `cuda`; None: CUDA where there is one.
        base: catalogue device whose peaks apply; None: by the name the driver gives.
        local: also time messages and all-reduces between so many processes on this machine.

    Raises:
        InputError: no such device here, or none in the catalogue by its name.
        RunError: a process of the link measurement failed.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise InputError(f"--device: expected 'cpu' or 'cuda', found '{device}'")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no CUDA device here")
    if local is not None and local < 2:
        raise InputError(f"--local needs at least 2 processes to measure between, found {local}")
    if local is not None and kind == "cuda" and local > torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise InputError(f"--local {local}: NCCL takes one process for each CUDA device, and there are {count}")
    where = torch.device(kind)
    name = torch.cuda.get_device_name(where) if kind == "cuda" else _processor()
    entry = catalogue_device(base or catalogue_name(kind, name)) if base is None or base in device_names() else None
    if entry is None:
        raise InputError(f"--base: unknown device '{base}'{device_hint(str(base))}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        samples = measure(where, extent(where, quick), on_progress)
    finally:
        torch.set_num_threads(threads)
    dtype = "bf16" if kind == "cuda" else "fp32"
    parameters = fit_device(samples, entry.device, dtype, known_peaks=kind == "cuda")
    link = {}
    if local is not None:
        on_progress(f"messages and all-reduces between {local} processes")
        link = fit_link(measure_links(local, kind, quick=quick), catalogue_link(entry.node_link))
    return Profile(
        base=entry.device.name,
        device=name,
        kind="cuda" if kind == "cuda" else "cpu",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        quick=quick,
        software=_software(kind),
        parameters=parameters,
        link=link,
    )


def catalogue_name(kind: str, name: str) -> str:
    """The catalogue's device for the one here; InputError where there is none."""
    found = "cpu-core" if kind == "cpu" else device_of_driver(name)
    if found is None:
        raise InputError(f"the catalogue has no '{name}': name a device with its data-sheet peaks by --base")
    return found


def _software(kind: str) -> dict[str, str]:
    known = {"mmplan": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    if kind == "cuda":
        known["cuda"] = str(torch.version.cuda or torch.version.hip)
    return known


def _processor() -> str:
    """The processor's name where the system tells it, and how many cores there are."""
    cores = os.cpu_count() or 1
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, one of {cores} cores"
