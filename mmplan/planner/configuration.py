"""The degrees a plan can have: how many replicas, tensor shards and stages, and how the batch is cut."""

from dataclasses import dataclass, replace
from functools import cache
from math import isqrt

import numpy as np

from mmplan.cost_models.layout import Layout, spread_text, together_text
from mmplan.planner.mesh import Mesh
from mmplan.scenario.cluster import Cluster
from mmplan.scenario.scenario import Scenario
from mmplan.scenario.schedule_names import IN_TWO_CHUNKS, ScheduleName
from mmplan.scenario.technique import Sharding

# Chunks per rank that are tried where constraints ask for interleaving without numbers; more save little of a bubble
# that is a sixth already.
CHUNKS = (1, 2, 3, 4, 6)
FEW_CHUNKS = (1, 2, 3, 4)  # where they leave it open
# Forwards of one replica: 64 stages x 8,192 microbatches. A program of that size takes a minute to build and check.
MOST_FORWARDS = 524_288


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Configuration:
    """Everything about a plan but the cut; `microbatches` per replica and step, `vp` chunks of layers
    per rank.

    `meshes`: modules with ranks of their own, whose stages come first, `mesh_stages` of each; `pp` counts all stages,
    the other degrees are those of all other modules. `first_rank`: where its ranks begin; `world`: where those of the
    whole plan end, 0 if it is the whole plan.
    """

    tp: int
    dp: int
    pp: int
    microbatch_size: int
    microbatches: int
    schedule: ScheduleName
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sharding: Sharding = "none"
    spread: tuple[str, ...] = ()
    patches: tuple[str, ...] = ()
    together: tuple[str, ...] = ()
    batch_factor: int = 1
    prefetch: tuple[str, ...] = ()
    meshes: tuple[Mesh, ...] = ()
    mesh_stages: tuple[int, ...] = ()
    first_rank: int = 0
    world: int = 0
    vp: int = 1

    @property
    def stages(self) -> int:
        """Pieces of the model."""
        return self.pp * self.vp

    @property
    def ranks(self) -> int:
        """Ranks that work."""
        beside = sum(mesh.ranks * stages for mesh, stages in zip(self.meshes, self.mesh_stages, strict=True))
        return self.tp * self.cp * self.dp * self.base_stages + beside

    @property
    def base_stages(self) -> int:
        """Stages of modules without a mesh of their own."""
        return self.pp - sum(self.mesh_stages)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Where ranks that work begin and end, of each mesh and of all other modules."""
        own = self.first_rank, self.first_rank + self.tp * self.cp * self.dp * self.base_stages
        meshes = zip(self.meshes, self.mesh_stages, strict=True)
        return (own, *((mesh.first_rank, mesh.first_rank + mesh.ranks * stages) for mesh, stages in meshes))

    @property
    def last_rank(self) -> int:
        """Of the whole plan."""
        return max(self.world, *(end for _, end in self.spans)) - 1

    @property
    def mesh(self) -> Mesh:
        """That of modules without one of their own."""
        return Mesh(modules=(), tp=self.tp, cp=self.cp, dp=self.dp, first_rank=self.first_rank)

    def side(self, mesh: Mesh) -> "Configuration":
        """The ranks of one of the meshes, or of all other modules, as a configuration of their own."""
        world = self.last_rank + 1
        if mesh not in self.meshes:
            return replace(self, pp=self.base_stages, meshes=(), mesh_stages=(), world=world)
        return Configuration(
            tp=mesh.tp,
            cp=mesh.cp,
            ep=mesh.ep,
            dp=mesh.dp,
            spread=mesh.spread,
            patches=mesh.patches,
            pp=self.mesh_stages[self.meshes.index(mesh)],
            microbatch_size=self.microbatch_size * self.dp // mesh.dp,
            microbatches=self.microbatches,
            schedule=self.schedule,
            sharding=self.sharding,
            first_rank=mesh.first_rank,
            world=world,
        )

    @property
    def layout(self) -> Layout:
        """How the ranks of a stage share its layers, without recomputation."""
        return Layout(
            tp=self.tp,
            cp=self.cp,
            ep=self.ep,
            etp=self.etp,
            dp=self.dp,
            sharding=self.sharding,
            spread=self.spread,
            patches=self.patches,
            together=self.together,
            batch_factor=self.batch_factor,
        )

    def layout_of(self, row: int, cluster: Cluster) -> Layout:
        """The same with the pools in which a pipeline rank lies."""
        if len(cluster.pools) == 1:
            return self.layout
        count = self.tp * self.cp * self.dp
        first = self.first_rank + row * count
        return replace(self.layout, pools=cluster.pools_of(first, first + count - 1) or (0,))

    def __str__(self) -> str:
        cp = f" x cp={self.cp}" if self.cp > 1 else ""
        experts = f", ep={self.ep} (etp={self.etp})" if self.ep > 1 else ""
        sharding = f", {self.sharding} sharded" if self.sharding != "none" else ""
        spread = spread_text(self.spread, self.patches) + together_text(self.together, self.batch_factor)
        spread += f", {' and '.join(self.prefetch)} a step ahead" if self.prefetch else ""
        for mesh, stages in zip(self.meshes, self.mesh_stages, strict=True):
            spread += f", {' and '.join(mesh.modules)} on pp={stages} x {mesh}"
        chunks = f" x {self.vp} chunks" if self.vp > 1 else ""
        return (
            f"pp={self.base_stages}{chunks} x dp={self.dp}{cp} x tp={self.tp}{experts}{sharding}{spread}, "
            f"{self.microbatches} microbatches of {self.microbatch_size}, {self.schedule}"
        )


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [value for value in range(1, isqrt(number) + 1) if number % value == 0]
    return tuple(sorted({*small, *(number // value for value in small)}))


def why_empty(scenario: Scenario, groups: int, shards: list[int]) -> str:
    """One sentence on the constraint that leaves no configuration."""
    rules, batch, devices = scenario.constraints, scenario.global_batch, scenario.cluster.device_count
    dp = [value for value in (rules.dp or divisors(batch)) if batch % value == 0]
    if not dp:
        quotients = ", ".join(f"{batch} / {d} = {batch / d:.4g}" for d in rules.dp[:4])
        return f"constraints.dp allows {_names(rules.dp)}, and none divides the global batch of {batch}: {quotients}"
    if rules.microbatch and not any(batch // d % size == 0 for d in dp for size in rules.microbatch):
        return (
            f"constraints.microbatch allows {_names(rules.microbatch)} samples, and with dp={_names(dp)} none divides "
            f"the batch of a replica: {', '.join(f'{batch} / {d} = {batch // d}' for d in dp[:4])}"
        )
    asked = dict(rules.encode_together or ())
    if why := _why_none_together(scenario, [of for of in asked.values() if of and 1 not in of], dp):
        return why
    pp = [value for value in rules.pp or (1,) if value <= groups]
    if not pp:
        why = ""
        if rules.no_split:
            pieces = "1 piece" if groups == 1 else f"{groups} pieces"
            joined = len(rules.no_split)
            why = f"; constraints.no_split keeps {joined} layers with their neighbours, which leaves {pieces}"
        most = "cannot be cut" if groups == 1 else f"can be cut into at most {groups} pieces"
        return f"constraints.pp allows {_names(rules.pp)} stages, but the model {most}{why}"
    needed = min(shards) * min(dp) * min(pp)
    if needed <= devices and rules.schedule and rules.vp and set(rules.schedule) <= set(IN_TWO_CHUNKS):
        names = " and ".join(rules.schedule)
        return (
            f"constraints.schedule allows {names} alone, in two chunks per rank, and constraints.vp {_names(rules.vp)}"
        )
    if needed <= devices and rules.schedule and "interleaved" not in rules.schedule and rules.vp and 1 not in rules.vp:
        return f"constraints.vp allows {_names(rules.vp)} chunks per rank, and constraints.schedule no interleaving"
    if needed <= devices and set(rules.schedule) == {"interleaved"} and set(rules.vp) == {1}:
        return "constraints.schedule allows interleaved alone, and constraints.vp one chunk per rank, which is none"
    if needed <= devices and rules.vp and 1 not in rules.vp and rules.pp and max(pp) == 1:
        allowed = f"constraints.vp allows {_names(rules.vp)} chunks per rank"
        return f"{allowed}, and constraints.pp one rank, which has one chunk"
    if needed <= devices and (set(rules.schedule) == {"interleaved"} or (rules.vp and 1 not in rules.vp)):
        return (
            f"chunks of constraints.vp ({_names(rules.vp or CHUNKS[1:])} per rank) need pp x vp pieces of the model, "
            f"which has {groups}, and microbatches that are a multiple of pp: no allowed dp and microbatch "
            f"of the global batch {batch:,} give both"
        )
    if needed <= devices:
        return (
            f"every allowed way to cut the global batch of {batch:,} makes more than {MOST_FORWARDS:,} forwards per "
            f"replica (stages x microbatches), and larger programs are not made: allow a larger dp or microbatch"
        )
    least = f"tp={min(shards)} x dp={min(dp)} x pp={min(pp)} = {needed}"
    return f"the smallest allowed layout needs {least} devices, cluster {scenario.cluster.name} has {devices}"


def _why_none_together(scenario: Scenario, asked: list[tuple[int, ...]], dp: list[int]) -> str:
    """Where no number of microbatches is a multiple of one that some encoder has to run at once."""
    rules, batch = scenario.constraints, scenario.global_batch
    if not asked:
        return ""
    counts = {
        (d, size): batch // d // size
        for d in dp
        for size in divisors(batch // d)
        if size in rules.microbatch or not rules.microbatch
    }
    if any(count % factor == 0 for count in counts.values() for of in asked for factor in of):
        return ""
    (d, size), count = min(counts.items())
    factors = _names(sorted({factor for of in asked for factor in of}))
    divided = f"{batch:,} / dp={d} / {size} = {count:,} microbatches"
    return (
        f"constraints.encode_together allows {factors} microbatches at once, and none divides their number: {divided}"
    )


def _names(values: tuple[int, ...] | list[int]) -> str:
    return ", ".join(str(value) for value in values)


def replicas_per_node(configuration: Configuration, cluster: Cluster) -> int:
    """How many of the dp * cp ranks with the same weights share a node, for the stage where this is least.

    Stage s starts at rank s * dp * cp * tp, so a node boundary may cut through its replicas.
    """
    replicas, tp, pp = configuration.dp * configuration.cp, configuration.tp, configuration.pp
    sizes = {pool.devices_per_node for pool in cluster.pools}
    if len(sizes) == 1 and not configuration.first_rank:
        return _least_in_equal_nodes(replicas, max(1, sizes.pop() // tp), pp)
    nodes = tuple((pool.nodes, pool.devices_per_node) for pool in cluster.pools)
    return _least_in_nodes(nodes, replicas, tp, pp, configuration.first_rank)


def _least_in_equal_nodes(replicas: int, slots: int, stages: int) -> int:
    """Counted in tensor-parallel groups, of which a node holds `slots` and which never leave it."""
    least = replicas
    for stage in range(min(stages, slots)):  # offsets repeat after at most `slots` stages
        first = min(replicas, slots - stage * replicas % slots)
        least = min(least, max(first, min(replicas - first, slots)))
    return least


@cache
def _least_in_nodes(pools: tuple[tuple[int, int], ...], replicas: int, tp: int, stages: int, start: int) -> int:
    """Counted over the first ranks of all tensor-parallel groups; `pools` as (nodes, devices in each)."""
    node_ends = np.cumsum(np.concatenate([np.full(nodes, devices) for nodes, devices in pools]))
    ranks = start + np.arange(stages * replicas) * tp
    node_of = np.searchsorted(node_ends, ranks, side="right").reshape(stages, replicas)
    return min(int(np.bincount(nodes - nodes[0]).max()) for nodes in node_of)
