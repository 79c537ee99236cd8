"""The machines: devices, nodes and links. Ranks are numbered node by node."""

from dataclasses import dataclass

from mmplan.scenario.origin import Origin


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator. Peaks are dense data-sheet rates; fractions say what large operators reach of them.

    `gemm_fraction` applies to large matrix products, `attention_fraction` to fused attention (FLOPs executed: half
    when causal), `memory_fraction` to memory-bound operators given their minimal byte counts, `launch_s` is the time
    floor of one operator. Each has its source in the hardware catalogue.

    `sm_count` units work on tiles of a product at a time (1: no wave quantisation); `attention` gives the fraction per
    attention implementation where it is known, in place of `attention_fraction`; `tile_depth` is the inner dimension at
    which start and end of a tile take as long as its products. `update_fraction`: of the memory bandwidth that an
    optimizer update reaches, where it was measured. `origins` say where numbers come from and how far they may be off;
    those without one are data-sheet numbers. `host_bytes_per_s`: of copies between its memory and the host's, in one
    direction; None where the link is not known.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    fp32_flops_per_s: float
    bf16_flops_per_s: float | None
    fp16_flops_per_s: float | None
    gemm_fraction: float
    attention_fraction: float
    memory_fraction: float
    launch_s: float
    reserved_bytes: int  # context, communication buffers and allocator slack that no tensor can use
    source: str
    sm_count: int = 1
    fp8_flops_per_s: float | None = None
    fp8_gemm_fraction: float | None = None
    attention: tuple[tuple[str, float], ...] = ()
    generation: str = ""
    tile_depth: float = 0.0
    update_fraction: float | None = None
    host_bytes_per_s: float | None = None
    origins: tuple[Origin, ...] = ()

    def flops_per_s(self, dtype: str) -> float | None:
        """Peak rate for `dtype`, or None when the device has no such units."""
        rates = {"fp32": self.fp32_flops_per_s, "bf16": self.bf16_flops_per_s, "fp16": self.fp16_flops_per_s}
        return rates[dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One direction of a device's share of a network level, with what large messages reach of it.

    `nvls`: switches inside a node add what passes through them (NVLink SHARP). `sharp`: those between nodes do.
    `oversubscription`: ports of a switch towards devices over ports towards the other switches; when all devices talk
    at a time, messages between switches get so much less. 1: non-blocking, or rail-optimised.
    `direct_peers`: without a switch the bandwidth is spread over links to so many other devices; 1: with one.
    `pipelined`: collectives over nodes use the network and the links inside nodes at the same time.
    `rings`: then all-reduces go round all ranks, as gathers do: of n ranks on m nodes (n - 1) / n of the bytes cross
    the network each way, and not (m - 1) / m.
    """

    bytes_per_s: float
    latency_s: float
    fraction: float
    source: str
    origins: tuple[Origin, ...] = ()
    nvls: bool = False
    sharp: bool = False
    oversubscription: float = 1.0
    direct_peers: int = 1
    pipelined: bool = False
    rings: bool = False

    @property
    def reached_bytes_per_s(self) -> float:
        """What large messages reach."""
        return self.bytes_per_s * self.fraction / self.oversubscription

    def group_bytes_per_s(self, ranks: int) -> float:
        """What large messages of each of `ranks` devices (two at least) reach among themselves."""
        rate = self.bytes_per_s * self.fraction / self.oversubscription
        return rate if ranks > self.direct_peers else rate * (ranks - 1) / self.direct_peers


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """`nodes` equal nodes; `node_link` joins the devices of a node. `price_per_hour`: of one device, in one currency
    for all pools; None where it is not told."""

    device: Device
    nodes: int
    devices_per_node: int
    node_link: Link
    price_per_hour: float | None = None

    @property
    def device_count(self) -> int:
        return self.nodes * self.devices_per_node


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Pools in rank order, joined by `network_link` (bandwidth per device)."""

    name: str
    pools: tuple[Pool, ...]
    network_link: Link

    @property
    def device_count(self) -> int:
        return sum(pool.device_count for pool in self.pools)

    def pool_of(self, rank: int) -> Pool:
        """The pool that holds `rank`; IndexError beyond the last one."""
        first = 0
        for pool in self.pools:
            if rank < first + pool.device_count:
                return pool
            first += pool.device_count
        raise IndexError(f"rank {rank} of {first} devices")

    def pools_of(self, first: int, last: int) -> tuple[int, ...]:
        """Indices of the pools that hold ranks from `first` to `last`, which are on the cluster; ascending."""
        found, start = [], 0
        for index, pool in enumerate(self.pools):
            if first < start + pool.device_count and last >= start:
                found.append(index)
            start += pool.device_count
        return tuple(found)

    def node_of(self, rank: int) -> int:
        """Index of the node that holds `rank`, counted over all pools."""
        first_rank = first_node = 0
        for pool in self.pools:
            if rank < first_rank + pool.device_count:
                return first_node + (rank - first_rank) // pool.devices_per_node
            first_rank += pool.device_count
            first_node += pool.nodes
        raise IndexError(f"rank {rank} of {first_rank} devices")
