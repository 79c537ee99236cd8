"""The bundled hardware catalogue: devices and links by name, from `hardware.yaml`."""

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from mmplan.scenario.cluster import Device, Link
from mmplan.units import parse_bytes, parse_bytes_per_s, parse_flops_per_s, parse_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogueDevice:
    """A device with the names of the links that usually join it to others in its node and across nodes."""

    device: Device
    node_link: str
    network: str


@cache
def _catalogue() -> dict[str, dict[str, dict[str, Any]]]:
    text = resources.files("mmplan.scenario").joinpath("hardware.yaml").read_text(encoding="utf-8")
    content: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(text)
    return content


def device_names() -> tuple[str, ...]:
    """All devices of the catalogue."""
    return tuple(_catalogue()["devices"])


def link_names() -> tuple[str, ...]:
    """All links of the catalogue."""
    return tuple(_catalogue()["links"])


def catalogue_device(name: str) -> CatalogueDevice:
    """The device of that name; KeyError when there is none."""
    own = _catalogue()["devices"][name]
    generation = _catalogue()["generations"][own["generation"]]
    row = {**generation, **own}
    rates = {dtype: parse_flops_per_s(row[dtype]) for dtype in ("fp32", "bf16", "fp16", "fp8") if dtype in row}
    device = Device(
        name=name,
        memory_bytes=parse_bytes(row["memory"]),
        memory_bytes_per_s=parse_bytes_per_s(row["memory_bandwidth"]),
        fp32_flops_per_s=rates["fp32"],
        bf16_flops_per_s=rates.get("bf16"),
        fp16_flops_per_s=rates.get("fp16"),
        gemm_fraction=row["gemm_fraction"],
        attention_fraction=row["attention_fraction"],
        memory_fraction=row["memory_fraction"],
        launch_s=parse_seconds(row["launch"]),
        reserved_bytes=parse_bytes(row["reserved"]),
        source=f"{own['source']}; fractions of {own['generation']}: {generation['source']}",
        sm_count=row["sm_count"],
        fp8_flops_per_s=rates.get("fp8"),
        fp8_gemm_fraction=row.get("fp8_gemm_fraction"),
        attention=tuple(row["attention"].items()),
        generation=own["generation"],
        tile_depth=row["tile_depth"],
    )
    return CatalogueDevice(device=device, node_link=row["node_link"], network=row["network"])


def catalogue_link(name: str) -> Link:
    """The link of that name; KeyError when there is none."""
    row = _catalogue()["links"][name]
    return Link(
        bytes_per_s=parse_bytes_per_s(row["bandwidth"]),
        latency_s=parse_seconds(row["latency"]),
        fraction=row["fraction"],
        source=row["source"],
    )
