"""The `cluster` part of a scenario file as a `Cluster`."""

from collections.abc import Sequence
from dataclasses import replace

from mmplan.scenario.catalogue import catalogue_device, catalogue_link, device_hint, device_names, link_names
from mmplan.scenario.cluster import Cluster, Device, Link, Pool
from mmplan.scenario.document import Document, KeyPath, did_you_mean, listed, shown
from mmplan.scenario.origin import Origin, assumed_origin
from mmplan.scenario.profile import load_profile, profile_device, profile_link
from mmplan.scenario.schema_cluster import ClusterSpec, DeviceSpec, LinkSpec, PoolSpec


def cluster_from_spec(spec: ClusterSpec, document: Document) -> Cluster:
    """The cluster; links that are not given are those the catalogue names for the device.

    Raises:
        InputError: unknown device or link, a device of the user's own without links, or pools beside a device.
    """
    if spec.pools is not None:
        return _pooled(spec, spec.pools, document)
    if spec.profile is not None:
        device, measured_link, default_node_link, default_network = _profiled(spec.profile, spec.device, document)
    elif spec.device is not None:
        device, default_node_link, default_network = _device(("cluster",), spec.device, document)
        measured_link = None
    else:
        message = "this key is missing, and there is no 'profile' and are no 'pools' in its place"
        raise document.error(("cluster", "device"), message)
    if spec.devices_per_node is None:
        raise document.error(("cluster", "devices_per_node"), "this key is missing")
    device = _with_memory(("cluster",), device, spec.memory, document)
    if measured_link is not None and spec.node_link is None:
        node_link = measured_link
    else:
        node_link = _link(("cluster", "node_link"), spec.node_link, default_node_link, document)
    if spec.nodes == 1 and spec.network is None and default_network is None:
        network = node_link  # never used: there is one node
    else:
        network = _link(("cluster", "network"), spec.network, default_network, document)
    name = spec.name or f"{device.name}-{spec.nodes}x{spec.devices_per_node}"
    pool = _pool(spec, device, spec.devices_per_node, node_link)
    return Cluster(name=name, pools=(pool,), network_link=network)


def _pooled(spec: ClusterSpec, pools: Sequence[PoolSpec], document: Document) -> Cluster:
    """Pools in the order of the file; a network that is not given is the slowest that their devices usually have."""
    for key in ("device", "profile", "devices_per_node", "memory", "node_link", "price_per_hour"):
        if getattr(spec, key) is not None:
            raise document.error(("cluster", key), "with 'pools' this is said of each pool")
    found, networks = [], []
    for index, pool in enumerate(pools):
        at: KeyPath = ("cluster", "pools", index)
        device, default_node_link, default_network = _device(at, pool.device, document)
        node_link = _link((*at, "node_link"), pool.node_link, default_node_link, document)
        device = _with_memory(at, device, pool.memory, document)
        found.append(_pool(pool, device, pool.devices_per_node, node_link))
        networks.append(default_network)
    if spec.network is not None or None in networks:
        network = _link(("cluster", "network"), spec.network, None, document)
    else:
        usual = [_catalogue_link(("cluster", "network"), str(name), document) for name in networks]
        network = min(usual, key=lambda link: link.reached_bytes_per_s)
    parts = "+".join(f"{pool.device.name}-{pool.nodes}x{pool.devices_per_node}" for pool in found)
    return Cluster(name=spec.name or parts, pools=tuple(found), network_link=network)


def _pool(spec: ClusterSpec | PoolSpec, device: Device, devices_per_node: int, node_link: Link) -> Pool:
    return Pool(
        device=device,
        nodes=spec.nodes,
        devices_per_node=devices_per_node,
        node_link=node_link,
        price_per_hour=spec.price_per_hour,
    )


def _with_memory(at: KeyPath, device: Device, memory_bytes: int | None, document: Document) -> Device:
    if memory_bytes is None:
        return device
    if device.reserved_bytes >= memory_bytes:
        message = f"memory = {memory_bytes:,} bytes, of which {device.reserved_bytes:,} are reserved: nothing is left"
        raise document.error((*at, "memory"), message)
    return replace(device, memory_bytes=memory_bytes)


def _profiled(
    name: str, named: str | DeviceSpec | None, document: Document
) -> tuple[Device, Link | None, str | None, str | None]:
    """The device and link of a profile, and the links that its base device usually has."""
    at: KeyPath = ("cluster", "profile")
    path = document.file.parent / name
    if not path.is_file():
        raise document.error(at, f"no such file {shown(name)}; mmplan calibrate -o writes one")
    profile = load_profile(path)
    if named is not None and named != profile.base:
        found = f"'{named}'" if isinstance(named, str) else "a device of your own"
        raise document.error(at, f"the profile was measured on '{profile.base}', cluster.device is {found}")
    entry = catalogue_device(profile.base)
    source = f"profile {name}"
    return profile_device(profile, source), profile_link(profile, source), entry.node_link, entry.network


def _device(at: KeyPath, spec: str | DeviceSpec, document: Document) -> tuple[Device, str | None, str | None]:
    if isinstance(spec, str):
        if spec not in device_names():
            raise document.error((*at, "device"), f"unknown device {shown(spec)}{device_hint(spec)}")
        entry = catalogue_device(spec)
        return entry.device, entry.node_link, entry.network
    device = Device(
        name=spec.name,
        memory_bytes=spec.memory,
        memory_bytes_per_s=spec.memory_bandwidth,
        fp32_flops_per_s=spec.fp32,
        bf16_flops_per_s=spec.bf16,
        fp16_flops_per_s=spec.fp16,
        gemm_fraction=spec.gemm_fraction,
        attention_fraction=spec.attention_fraction,
        memory_fraction=spec.memory_fraction,
        launch_s=spec.launch,
        reserved_bytes=spec.reserved,
        source=spec.source or "scenario file",
        origins=tuple(map(assumed_origin, ("gemm_fraction", "memory_fraction", "attention.flash2", "launch_s"))),
    )
    if device.reserved_bytes >= device.memory_bytes:
        message = f"reserved = {device.reserved_bytes:,} bytes leave nothing of memory = {device.memory_bytes:,} bytes"
        raise document.error((*at, "device", "reserved"), message)
    return device, None, None


def _link(at: KeyPath, spec: str | LinkSpec | None, default: str | None, document: Document) -> Link:
    if isinstance(spec, LinkSpec):
        return _own_link(at, spec, document)
    name = spec or default
    if name is None:
        raise document.error(at, "a device that is not in the catalogue needs this link")
    return _catalogue_link(at, name, document)


def _own_link(at: KeyPath, spec: LinkSpec, document: Document) -> Link:
    """A link written out, or a catalogue link with some of its numbers replaced."""
    if spec.link is not None:
        base = _catalogue_link((*at, "link"), spec.link, document)
    else:
        for key in ("bandwidth", "latency"):
            if getattr(spec, key) is None:
                raise document.error((*at, key), "this key is missing")
        assumed = assumed_origin("fraction"), assumed_origin("latency_s")
        base = Link(bytes_per_s=1.0, latency_s=0.0, fraction=1.0, source="scenario file", origins=assumed)
    return replace(
        base,
        bytes_per_s=base.bytes_per_s if spec.bandwidth is None else spec.bandwidth,
        latency_s=base.latency_s if spec.latency is None else spec.latency,
        fraction=base.fraction if spec.fraction is None else spec.fraction,
        nvls=base.nvls if spec.nvls is None else spec.nvls,
        sharp=base.sharp if spec.sharp is None else spec.sharp,
        oversubscription=spec.oversubscription,
        direct_peers=base.direct_peers if spec.direct_peers is None else spec.direct_peers,
        pipelined=base.pipelined if spec.pipelined is None else spec.pipelined,
        rings=base.rings if spec.rings is None else spec.rings,
        source=spec.source or base.source,
        origins=_kept_origins(base, spec),
    )


def _kept_origins(base: Link, spec: LinkSpec) -> tuple[Origin, ...]:
    """Those of the base, but assumed where the file writes another number; a written bandwidth is a data-sheet one."""
    written = {"latency_s": spec.latency, "fraction": spec.fraction}
    kept = (origin for origin in base.origins if spec.bandwidth is None or origin.parameter != "bytes_per_s")
    return tuple(
        assumed_origin(origin.parameter) if written.get(origin.parameter) is not None else origin for origin in kept
    )


def _catalogue_link(at: KeyPath, name: str, document: Document) -> Link:
    if name not in link_names():
        message = f"expected a catalogue link or {{bandwidth, latency}}, found {shown(name)}"
        raise document.error(at, message + _hint(name, link_names()))
    return catalogue_link(name)


def _hint(word: str, known: Sequence[str]) -> str:
    return did_you_mean(word.lower(), known) or f"; known: {listed(known, 40)}"
