"""The form of `cluster` in a scenario file: devices, links and pools of machines."""

from typing import Annotated

from pydantic import Field, Tag

from mmplan.scenario.schema_base import NAME_OR_MAPPING, Fraction, Name, Price, Strict
from mmplan.scenario.schema_values import Bandwidth, Bytes, Rate, Seconds


class LinkSpec(Strict):
    """One direction of a device's share of a network level; with `link` what is not written is that link's."""

    link: str | None = Field(default=None, description="a catalogue link to start from")
    bandwidth: Bandwidth | None = Field(default=None, description="needed without link")
    latency: Seconds | None = Field(default=None, description="needed without link")
    fraction: Fraction | None = Field(
        default=None, description="what large messages reach of the bandwidth; 1 without link"
    )
    nvls: bool | None = Field(default=None, description="switches inside a node add what passes through them (NVLS)")
    sharp: bool | None = Field(default=None, description="network switches add what passes through them (SHARP)")
    oversubscription: Annotated[float, Field(ge=1, le=1000)] = Field(
        default=1.0, description="ports of a switch towards devices over ports towards other switches"
    )
    direct_peers: Annotated[int, Field(ge=1, le=1023)] | None = Field(
        default=None,
        description="over how many other devices the bandwidth is spread by direct links: n devices reach (n - 1) of "
        "these shares; 1: a switch gives any pair all of it",
    )
    pipelined: bool | None = Field(
        default=None,
        description="of a network: collectives over nodes use it and the links inside nodes at a time, as NCCL's rings "
        "do with large messages; without it one after the other",
    )
    rings: bool | None = Field(
        default=None,
        description="of a pipelined network: all-reduces over nodes are rings through all ranks, not trees over the "
        "nodes: of 16 ranks on 2 nodes 15/16 of the bytes cross the network each way, not 1/2",
    )
    source: Annotated[str, Field(max_length=500)] = Field(default="", description="where the numbers come from")


_PRICE = "of one device that a plan uses, in any currency, the same everywhere; needed for --objective cost"
NamedLink = Annotated[Annotated[str, Tag("name")] | Annotated[LinkSpec, Tag("mapping")], NAME_OR_MAPPING]


class DeviceSpec(Strict):
    """A device that is not in the catalogue. Rates are dense (not sparse)."""

    name: Name
    memory: Bytes
    memory_bandwidth: Bandwidth
    fp32: Rate
    bf16: Rate | None = None
    fp16: Rate | None = None
    gemm_fraction: Fraction = Field(description="what large matrix products reach of the peak")
    attention_fraction: Fraction = Field(description="what fused attention reaches of the peak")
    memory_fraction: Fraction = Field(description="what memory-bound operators reach of the bandwidth")
    launch: Seconds = Field(description="time floor of one operator, for example '5 us'")
    reserved: Bytes = Field(description="memory no tensor can use: context, communication buffers")
    source: str = ""


NamedDevice = Annotated[Annotated[str, Tag("name")] | Annotated[DeviceSpec, Tag("mapping")], NAME_OR_MAPPING]


class PoolSpec(Strict):
    """Equal machines of a cluster with several kinds."""

    device: NamedDevice = Field(description="name in the hardware catalogue, or a device of your own")
    nodes: Annotated[int, Field(ge=1, le=100_000)] = Field(default=1, description="number of nodes")
    devices_per_node: Annotated[int, Field(ge=1, le=1024)] = Field(description="devices in a node")
    memory: Bytes | None = Field(default=None, description="of each device, if not what the catalogue says")
    node_link: NamedLink | None = Field(default=None, description="catalogue link inside a node; default: the device's")
    price_per_hour: Price | None = Field(default=None, description=_PRICE)


class ClusterSpec(Strict):
    """The machines: of one kind, or of several as `pools`."""

    name: Name | None = Field(default=None, description="default: made of the device and the counts")
    device: NamedDevice | None = Field(
        default=None, description="name in the hardware catalogue, such as h100-sxm, or a device of your own"
    )
    profile: str | None = Field(
        default=None,
        description="instead of device: a profile that mmplan calibrate wrote, relative to this file; with a device of "
        "the catalogue: its measured numbers replace that device's",
    )
    nodes: Annotated[int, Field(ge=1, le=100_000)] = Field(default=1, description="number of nodes")
    devices_per_node: Annotated[int, Field(ge=1, le=1024)] | None = Field(default=None, description="devices in a node")
    memory: Bytes | None = Field(default=None, description="of each device, if not what the catalogue says")
    node_link: NamedLink | None = Field(default=None, description="catalogue link inside a node; default: the device's")
    network: NamedLink | None = Field(default=None, description="catalogue link between nodes; default: the device's")
    price_per_hour: Price | None = Field(default=None, description=_PRICE)
    pools: list[PoolSpec] | None = Field(
        default=None, min_length=1, max_length=3, description="instead of device: machines of several kinds"
    )
