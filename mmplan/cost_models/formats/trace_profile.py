"""A profile (`cluster: {profile: FILE}`) of the operators in a trace: what large ones reached of the data sheet's
peaks.

Calibration's own fit is applied to the kernels of a training run in place of microbenchmarks: matrix products by their
sizes, fused attention, point-wise operators, and all-reduces inside a node. What the trace does not show stays the
catalogue's.
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from mmplan.cost_models.calibration import attention_fraction, fit_link, gemm_fraction, moved_fraction
from mmplan.cost_models.formats.trace_reading import Analysed, analysed, recordings_of
from mmplan.cost_models.traces.samples import TraceSamples, samples_of
from mmplan.errors import CostModelError, InputError
from mmplan.scenario.catalogue import catalogue_device, catalogue_link
from mmplan.scenario.cluster import Device, Link
from mmplan.scenario.document import counted, listed
from mmplan.scenario.driver_names import device_of_driver
from mmplan.scenario.formats.reading import Reading
from mmplan.scenario.profile import Measured, Profile, profile_document
from mmplan.units import format_bytes_per_s, format_seconds

_LEAST_SHAPES = 3
_ABOVE_PEAK = 1.05
_LEAST_SPREAD = 10  # of message sizes, largest over smallest: fewer do not tell latency from bandwidth


def read_trace_profile(paths: Sequence[Path]) -> Reading:
    """The profile that traces of one kind of device give.

    Raises:
        InputError: no trace, a device that is not in the catalogue, or nothing that a profile holds.
    """
    ranks = [analysed(recording) for recording in recordings_of(paths)]
    name, base = _device(ranks, paths[0])
    samples = samples_of([(item.recording, item.attribution) for item in ranks])
    catalogue = catalogue_device(base)
    read, ignored = list[str](), list[str]()
    parameters = _parameters(samples, catalogue.device, read, ignored)
    link = _link(samples, catalogue_link(catalogue.node_link), read, ignored)
    if not parameters and not link:
        raise InputError(f"nothing in it that a profile holds: {'; '.join(ignored)}", file=paths[0])
    profile = Profile(
        base=base,
        device=name,
        kind="cuda",
        date=datetime.fromtimestamp(paths[0].stat().st_mtime, UTC).isoformat(timespec="seconds"),
        quick=False,
        software={},
        parameters=parameters,
        link=link,
        refined_by=", ".join(path.name for path in paths)[:200],
    )
    return Reading(
        kind="trace-profile",
        fragment=profile_document(profile),
        document="profile for `cluster.profile`",
        read=tuple(read),
        ignored=tuple(ignored),
        warnings=tuple(sentence for item in ranks for sentence in item.recording.warnings),
    )


def _device(ranks: Sequence[Analysed], path: Path) -> tuple[str, str]:
    """(the driver's name, the catalogue's)."""
    names = list(dict.fromkeys(item.recording.device_name for item in ranks if item.recording.device_name))
    if not any(len(item.recording.work) for item in ranks):
        raise InputError("no device work in it: record with ProfilerActivity.CUDA", file=path)
    if len(names) != 1:
        found = listed(names) if names else "none: the trace has no deviceProperties"
        raise InputError(f"expected traces of one kind of device, found {found}", file=path)
    base = device_of_driver(names[0])
    if base is None:
        raise InputError(f"the catalogue has no '{names[0]}', so fractions of its peaks cannot be told", file=path)
    return names[0], base


def _parameters(samples: TraceSamples, device: Device, read: list[str], ignored: list[str]) -> dict[str, Measured]:
    found: dict[str, Measured] = {}
    dtypes = {item.dtype for item in samples.products} - {"fp32"}
    slow = [
        item for item in samples.products if item.flops / item.timed.seconds <= _ABOVE_PEAK * _peak(device, item.dtype)
    ]
    if len(slow) < len(samples.products):
        over = counted(len(samples.products) - len(slow), "product")
        ignored.append(f"{over} faster than the data sheet's peak (TF32, sparsity, another device): left out")
    chosen = max(dtypes, key=lambda dtype: sum(item.dtype == dtype for item in slow), default="")
    kept = [item for item in slow if item.dtype == chosen]
    fits: list[tuple[str, int, Callable[[], Measured], str]] = [
        ("gemm_fraction", len(kept), lambda: gemm_fraction(kept, device, chosen), "sizes of 16-bit matrix products"),
        (
            "memory_fraction",
            len(samples.pointwise),
            lambda: moved_fraction(samples.pointwise, device, "memory_fraction"),
            "sizes of point-wise operators",
        ),
    ]
    for kind in sorted({item.kind for item in samples.attention} & {name for name, _ in device.attention}):
        own = [item for item in samples.attention if item.kind == kind]
        fits.append((f"attention.{kind}", len(own), _of_kind(samples, device, kind), "fused attention"))
    for name, shapes, fit, what in fits:
        if shapes < (1 if name.startswith("attention") else _LEAST_SHAPES):
            ignored.append(
                f"{name}: {counted(shapes, 'shape')} of {what}, {_LEAST_SHAPES} are needed (record_shapes=True)"
            )
            continue
        try:
            found[name] = fit()
        except CostModelError:
            ignored.append(f"{name}: no operator of the {shapes} is long enough to tell a rate")
            continue
        number = found[name]
        read.append(
            f"{name} {number.value:.3f} (P10 {number.p10:.3f}, P90 {number.p90:.3f}) of {counted(shapes, 'shape')}"
        )
    return found


def _of_kind(samples: TraceSamples, device: Device, kind: str) -> Callable[[], Measured]:
    return lambda: attention_fraction(samples.attention, device, kind)


def _peak(device: Device, dtype: str) -> float:
    return device.flops_per_s(dtype) or device.fp32_flops_per_s


def _link(samples: TraceSamples, start: Link, read: list[str], ignored: list[str]) -> dict[str, Measured]:
    """Of all-reduces inside a node, by the fastest calls: the others wait for ranks that are late."""
    sizes = sorted({item.size for item in samples.exchanges})
    if len(sizes) < _LEAST_SHAPES or sizes[-1] < _LEAST_SPREAD * sizes[0]:
        ignored.append(
            f"link: {counted(len(sizes), 'size')} of all-reduces in groups inside a node; {_LEAST_SHAPES} that differ "
            f"{_LEAST_SPREAD} times are needed (nccl-tests measure it better: `mmplan import nccl`)"
        )
        return {}
    link = fit_link(samples.exchanges, start)
    rate, latency = link["bytes_per_s"], link["latency_s"]
    if rate.value > _ABOVE_PEAK * start.bytes_per_s:
        ignored.append(
            f"link: {format_bytes_per_s(rate.value)} is above the link's {format_bytes_per_s(start.bytes_per_s)}"
        )
        return {}
    read.append(
        f"link {format_bytes_per_s(rate.value)}, {format_seconds(latency.value)} by {len(sizes)} sizes of all-reduces"
    )
    return link
