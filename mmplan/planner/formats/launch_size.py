"""Devices, degrees and batch of a launched run, with what they leave open filled in and told."""

from dataclasses import dataclass

from mmplan.errors import InputError
from mmplan.planner.formats.launch_told import Told
from mmplan.scenario.formats.launch.facts import SetUp

NODE = 8  # devices of a node that no file describes
MOST_DEGREE = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Degrees, devices and batch; `etp` is None without experts."""

    tp: int
    pp: int
    cp: int
    ep: int
    etp: int | None
    vp: int
    dp: int
    nodes: int
    per_node: int
    microbatch: int
    global_batch: int

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def microbatches(self) -> int:
        return self.global_batch // (self.dp * self.microbatch)


def size_of(setup: SetUp, told: Told) -> Size:
    """Degrees and batch.

    Raises:
        InputError: numbers that are needed and unreadable, or that cannot be made: with the arithmetic.
    """
    tp, pp, cp, ep = (setup.count(name, most=MOST_DEGREE) or 1 for name in ("tp", "pp", "cp", "ep"))
    width = tp * pp * cp
    product = f"tp {tp} x cp {cp} x pp {pp}"
    if width > MOST_DEGREE:
        raise InputError(f"{product} = {width:,} devices: more than {MOST_DEGREE:,}", file=setup.files[0])
    multiple = setup.count("dp_multiple", most=MOST_DEGREE // width) or 1
    world, nodes, per_node = _devices(setup, width, multiple, product, told)
    if world % width:
        raise InputError(
            f"{world} devices / ({product} = {width}) = {world / width:g} replicas: no whole number",
            file=setup.files[0],
        )
    dp = world // width
    if dp % multiple:
        message = f"{world} devices / ({product}) = {dp} replicas, no multiple of {multiple}"
        raise setup.facts["dp_multiple"].error(message)
    experts = setup.has("experts") or ep > 1
    etp = (setup.count("etp", most=MOST_DEGREE) or 1) if setup.has("etp") else tp if experts and ep == 1 else 1
    microbatch, batch = _batch(setup, dp, told)
    return Size(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp if setup.has("etp") and ep > 1 else None,
        vp=_chunks(setup, pp, told),
        dp=dp,
        nodes=nodes,
        per_node=per_node,
        microbatch=microbatch,
        global_batch=batch,
    )


def _devices(setup: SetUp, width: int, multiple: int, product: str, told: Told) -> tuple[int, int, int]:
    """(world, nodes, devices per node): as said, else the least that the degrees need."""
    nodes, per_node = setup.count("nodes"), setup.count("per_node")
    world = _said_world(setup, nodes, per_node, width, told)
    if multiple > 1:
        width, product = width * multiple, f"{product} x replicas {multiple}"
    if world is None and per_node is not None:
        world = per_node * -(-width // per_node)
        told.warnings.append(
            f"no file says how many nodes: {world // per_node} of {per_node} devices, which {product} needs"
        )
    elif world is None and nodes is not None:
        per_node = max(NODE, -(-width // nodes))
        world = nodes * per_node
        told.warnings.append(f"no file says how many devices a node has: {per_node} are assumed")
    elif world is None:
        world = NODE * -(-width // NODE)
        world = width * (_replicas_of_batch(setup, world // width) or world // width)
        told.warnings.append(f"no file says how many devices: {world} are assumed, for {product}")
    elif nodes is not None and per_node is not None and nodes * per_node != world:
        told.warnings.append(f"{nodes} nodes x {per_node} devices = {nodes * per_node}, the file says {world}: {world}")
    if world < width:
        told.warnings.append(f"{product} = {width} devices, the file starts {world}: {width} are taken")
        world = width
    each = min(per_node or NODE, world)
    while world % each:
        each -= 1
    return world, world // each, each


def _said_world(setup: SetUp, nodes: int | None, per_node: int | None, width: int, told: Told) -> int | None:
    """Devices of the run, where arguments, replicas or a comment say them."""
    if (world := setup.count("world")) is not None:
        return world
    if nodes is not None and per_node is not None:
        return nodes * per_node
    for name in ("dp", "replicas"):
        if (replicas := setup.count(name)) is not None:
            return replicas * width
    if nodes is None and (replicas := setup.implied_replicas()) is not None:
        implied = f"global batch / (microbatch x accumulation) = {replicas} replicas"
        if per_node is None or replicas * width % per_node == 0:
            told.read.append(f"{implied} = {replicas * width} devices")
            return replicas * width
        told.warnings.append(
            f"{implied} = {replicas * width} devices, no whole number of nodes of {per_node}: not taken"
        )
    if nodes is None and per_node is None and (hinted := setup.count("hinted_world")) is not None:
        told.read.append(f"{hinted} devices, from {setup.facts['hinted_world'].place}")
        return hinted
    return None


def _replicas_of_batch(setup: SetUp, most: int) -> int | None:
    """The most replicas, `most` of them, that the global batch can be divided over; None where it is not known."""
    batch, micro = setup.count("global_batch"), setup.count("microbatch") or 1
    steps = setup.count("accumulation") or 1
    if batch is None or batch % (micro * steps):
        return None
    ep = setup.count("ep") or 1
    return next(
        (dp for dp in range(most, 0, -1) if (batch // (micro * steps)) % dp == 0 and (dp % ep == 0 or ep > most)), None
    )


def _chunks(setup: SetUp, pp: int, told: Told) -> int:
    chunks = setup.count("vp", most=1_000)
    each = setup.count("layers_per_chunk", most=10_000)
    layers = setup.count("layers", most=10_000)
    if chunks is None and each is not None and layers is not None and pp > 1:
        if layers % (pp * each):
            told.warnings.append(
                f"{layers} layers / (pp {pp} x {each} layers a chunk) = {layers / (pp * each):g} chunks: one is read"
            )
            return 1
        chunks = layers // (pp * each)
    if chunks is not None and chunks > 1 and pp == 1:
        told.warnings.append(f"{chunks} chunks per rank have no effect without a pipeline: pp is 1")
        return 1
    return chunks or 1


def _batch(setup: SetUp, dp: int, told: Told) -> tuple[int, int]:
    """(microbatch, global batch)."""
    micro, batch = setup.count("microbatch", most=1_000_000), setup.count("global_batch", most=10_000_000)
    steps = setup.count("accumulation", most=10_000_000)
    if micro is None and batch is not None and steps is not None and batch % (steps * dp) == 0:
        micro = batch // (steps * dp)
    if micro is None:
        micro = 1
        told.warnings.append("no file says the samples of a microbatch: 1 is assumed")
    if batch is None:
        batch = micro * dp * (steps or 1)
        how = f"{micro} x {steps or 1} x dp {dp}"
        told.warnings.append(f"the global batch is not written: {how} = {batch}")
    elif steps is not None and micro * steps * dp != batch:
        told.warnings.append(
            f"microbatch {micro} x accumulation {steps} x dp {dp} = {micro * steps * dp}, the global batch is {batch}: "
            "the global batch is taken"
        )
    if batch % (micro * dp):
        whole = max(1, round(batch / (micro * dp))) * micro * dp
        told.warnings.append(
            f"global batch {batch} / (microbatch {micro} x dp {dp}) = {batch / (micro * dp):g} microbatches: "
            f"no whole number; {whole} samples are taken"
        )
        batch = whole
    return micro, batch
