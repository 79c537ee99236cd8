"""The bundled hardware catalogue: devices and links by name, from `hardware.yaml`."""

import difflib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from mmplan.scenario.cluster import Device, Link
from mmplan.scenario.document import did_you_mean, listed
from mmplan.scenario.fitted import fitted_below, fitted_numbers
from mmplan.scenario.origin import Origin, assumed_origin, fitted_origin, other_machine_origin
from mmplan.units import parse_bytes, parse_bytes_per_s, parse_flops_per_s, parse_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogueDevice:
    """A device with the names of the links that usually join it to others in its node and across nodes."""

    device: Device
    node_link: str
    network: str


_NETWORK_LATENCY = "14 us"  # of NCCL's network level, see hardware.yaml


@cache
def _catalogue() -> dict[str, dict[str, dict[str, Any]]]:
    text = resources.files("mmplan.scenario").joinpath("hardware.yaml").read_text(encoding="utf-8")
    content: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(text)
    return content


def device_names() -> tuple[str, ...]:
    """All devices of the catalogue."""
    return tuple(_catalogue()["devices"])


def device_hint(name: str) -> str:
    """`; did you mean 'h100-sxm'?` for a name that the catalogue has not: devices whose names begin as it does first,
    for 'b200-sxm' is nearer to 'b200' than to 'h800-sxm'."""
    word = name.lower()
    chip = re.split(r"[^a-z0-9]", word.removeprefix("nvidia-").removeprefix("amd-"))[0]
    alike = [known for known in device_names() if known.split("-")[0] == chip]
    longer = [known for known in device_names() if chip and known.startswith(word)]
    close = longer or difflib.get_close_matches(word, alike, n=1, cutoff=0.8) or alike
    if close:
        return f"; did you mean {listed(close)}?"
    return did_you_mean(word, device_names()) or f"; known: {listed(device_names(), 40)}"


def link_names() -> tuple[str, ...]:
    """All links of the catalogue."""
    return tuple(_catalogue()["links"])


def catalogue_device(name: str) -> CatalogueDevice:
    """The device of that name; KeyError when there is none."""
    own = _catalogue()["devices"][name]
    generation = _catalogue()["generations"][own["generation"]]
    fitted = fitted_below(f"generation.{own['generation']}")
    row = {**generation, **fitted, **own}
    attention = {kind: fitted.get(f"attention.{kind}", value) for kind, value in generation["attention"].items()}
    rates = {dtype: parse_flops_per_s(row[dtype]) for dtype in ("fp32", "bf16", "fp16", "fp8") if dtype in row}
    device = Device(
        name=name,
        memory_bytes=parse_bytes(row["memory"]),
        memory_bytes_per_s=parse_bytes_per_s(row["memory_bandwidth"]),
        fp32_flops_per_s=rates["fp32"],
        bf16_flops_per_s=rates.get("bf16"),
        fp16_flops_per_s=rates.get("fp16"),
        gemm_fraction=row["gemm_fraction"],
        attention_fraction=attention["flash2"],
        memory_fraction=row["memory_fraction"],
        launch_s=parse_seconds(row["launch"]),
        reserved_bytes=parse_bytes(row["reserved"]),
        source=f"{own['source']}; fractions of {own['generation']}: {generation['source']}{_fit_note(fitted)}",
        sm_count=row["sm_count"],
        fp8_flops_per_s=rates.get("fp8"),
        fp8_gemm_fraction=row.get("fp8_gemm_fraction"),
        attention=tuple(attention.items()),
        generation=own["generation"],
        tile_depth=row["tile_depth"],
        host_bytes_per_s=_reached_bytes_per_s(row.get("host_link")),
        origins=_device_origins(row, own),
    )
    return CatalogueDevice(device=device, node_link=row["node_link"], network=row["network"])


def _reached_bytes_per_s(link: str | None) -> float | None:
    """What copies over a link reach in one direction; None without one."""
    if link is None:
        return None
    found = catalogue_link(link)
    return found.bytes_per_s * found.fraction


def catalogue_link(name: str) -> Link:
    """The link of that name; KeyError when there is none."""
    row = _catalogue()["links"][name]
    level = "network" if row["latency"] == _NETWORK_LATENCY else "node"
    fraction = (
        row["fraction"] if row["fraction"] == 1.0 else fitted_below(f"link.{level}").get("fraction", row["fraction"])
    )
    return Link(
        bytes_per_s=parse_bytes_per_s(row["bandwidth"]),
        latency_s=parse_seconds(row["latency"]),
        fraction=fraction,
        source=row["source"],
        origins=_link_origins(row, level),
        nvls=row.get("nvls", False),
    )


def _device_origins(row: dict[str, Any], own: dict[str, Any]) -> tuple[Origin, ...]:
    """Of a device's numbers: fitted to its generation, or assumed; peaks of the CPU were measured on one machine."""
    generation = row["generation"]
    names = ["gemm_fraction", "memory_fraction", "launch", "tile_depth", "fp8_gemm_fraction"]
    attention = [f"attention.{kind}" for kind in row["attention"]]
    names += attention
    if generation == "cpu":
        rates = [dtype + "_flops_per_s" for dtype in ("fp32", "bf16", "fp16") if dtype in own]
        fields = [*rates, "memory_bytes_per_s", "memory_fraction", "launch_s", *attention]
        return tuple(other_machine_origin(name) for name in fields)
    origins = []
    for name in names:
        number = fitted_numbers().get(f"generation.{generation}.{name}")
        field = "launch_s" if name == "launch" else name
        if number is not None:
            origins.append(fitted_origin(field, number))
        elif name in row or name.startswith("attention."):
            origins.append(assumed_origin(field))
    return tuple(origins)


def _link_origins(row: dict[str, Any], level: str) -> tuple[Origin, ...]:
    """The bandwidth is the data sheet's where a fraction of it is reached; else all of the link was measured once."""
    if row["fraction"] == 1.0:
        return other_machine_origin("bytes_per_s"), other_machine_origin("latency_s")
    number = fitted_numbers().get(f"link.{level}.fraction")
    fraction = assumed_origin("fraction") if number is None else fitted_origin("fraction", number)
    return fraction, assumed_origin("latency_s")


def _fit_note(fitted: dict[str, float]) -> str:
    return f"; fit: benchmarks/fit_parameters.py ({', '.join(fitted)})" if fitted else ""


def starting_value(name: str) -> float:
    """The value of a `generation.` or `link.` parameter as written in `hardware.yaml`, before any fit; KeyError when
    there is none."""
    kind, owner, *path = name.split(".")
    if kind == "link":
        return 0.74 if owner == "network" else 0.76
    value: Any = _catalogue()["generations"][owner]
    for part in path:
        value = value[part]
    return float(value)
