"""The plan: which layers run on which ranks, how the batch is cut, in which order stages work.

plan.json is small and complete: it holds the resolved scenario, so it can be simulated, checked and executed on another
machine. Ranks are laid out stage-major, then replica, then cp, then tp: stage `s` of replica `d` owns the `cp * tp`
ranks from `(s * dp + d) * cp * tp` on, which keeps a tensor-parallel group inside a node when `tp` divides the node.
Experts are spread over neighbouring ranks of a stage, those of one expert (etp) first. Modules with a mesh of their own
have their ranks behind one another from its `first_rank` on, in the same order with their own degrees.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import gcd, lcm
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from mmplan.cost_models.layout import Layout, RecomputeLevel
from mmplan.errors import InputError
from mmplan.files import write_file
from mmplan.planner.border import Border, TensorWay
from mmplan.planner.mesh import Mesh
from mmplan.planner.program import named_by_layers
from mmplan.scenario.asked import OwnRanks
from mmplan.scenario.document import read_text, shown
from mmplan.scenario.layer_ids import expand_ids, shorten_ids
from mmplan.scenario.scenario import Scenario
from mmplan.scenario.schedule_names import ScheduleName
from mmplan.scenario.technique import Sharding

SCHEMA_VERSION = 1
LARGEST_NUMBER = 2**63  # of seconds or bytes
MAX_PLAN_BYTES = 1_000_000_000  # a manifest of 64 MB, resolved

Status = Literal["optimal", "feasible", "given"]
Composition = Literal["in order", "reorder", "balance"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """One pipeline stage with what the planner expects of each of its ranks, per microbatch of mean size.

    `layers` are layer ids in topological order; `in_flight` counts microbatches whose activations are alive at once;
    `finish_s` is the gradient all-reduce and the optimizer update at the end of the step.
    """

    layers: tuple[str, ...]
    forward_s: float
    backward_s: float
    finish_s: float
    in_flight: int
    memory_bytes: int
    capacity_bytes: int
    recompute: RecomputeLevel = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """What is proved about the plan: closed-form step time, the lower bound over the whole search space, and how.

    `gap` = (objective_s - bound_s) / objective_s. Status `optimal`: gap within the asked tolerance; `feasible`: a
    limit or Ctrl-C ended the search first, or several chunks per rank, all of which the closed form counts as long as
    the busiest, are faster in simulation than any plan within it; `given`: made by hand, no bound. No mean
    step of the space searched (by other objectives: on no more devices) is below `any_schedule_s` in any order, if > 0.
    """

    objective_s: float
    bound_s: float
    gap: float
    status: Status
    wall_s: float
    any_schedule_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleCertificate:
    """What the search for a schedule proved of the plan's own cut, apart from the cut itself: seconds from the first to
    the last compute of a mean step without the reductions and updates behind it.

    `bound_s`: no order of these stages in this memory is faster. `method` found the orders.
    """

    makespan_s: float
    bound_s: float
    gap: float
    method: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkCertificate:
    """What is known of a plan with several chunks of layers per rank, which is faster in simulation than the one with
    one chunk that `certificate` speaks of.

    `stages`: those of that plan, one per rank. `step_s`: the mean step of this plan in simulation; `bound_s`: no plan
    of the search space takes less, with any number of chunks per rank and under any schedule.
    """

    stages: tuple[StagePlan, ...]
    step_s: float
    bound_s: float
    gap: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A complete plan.

    Attributes:
        cp, ep, etp, sharding, spread, patches, together, batch_factor: see `Layout`.
        prefetch: frozen modules whose stages run the next step's microbatches (`ahead.py`).
        placement: pipeline rank of each stage where ranks hold several; empty: stage `s` on pipeline rank `s`.
        orders: one line per pipeline rank of actions such as `3F0`. Empty for 1F1B and GPipe, which follow from the
            stages alone; every other schedule is kept as it is.
        meshes: modules with ranks of their own; `tp`, `cp`, `dp` and `microbatch_size` are those of all others.
        ways: how tensors cross between unlike meshes, where not as copies (`border.py`).
    """

    scenario: Scenario
    scenario_hash: str
    dp: int
    tp: int
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sharding: Sharding = "none"
    spread: tuple[str, ...] = ()
    patches: tuple[str, ...] = ()
    together: tuple[str, ...] = ()
    batch_factor: int = 1
    prefetch: tuple[str, ...] = ()
    microbatch_size: int  # samples per microbatch and replica
    microbatches: int  # per replica and step
    schedule: ScheduleName
    stages: tuple[StagePlan, ...]
    certificate: Certificate
    composition: Composition = "in order"  # of samples into microbatches (`composition.py`)
    placement: tuple[int, ...] = ()
    orders: tuple[str, ...] = ()
    schedule_certificate: ScheduleCertificate | None = None
    chunk_certificate: ChunkCertificate | None = None
    meshes: tuple[Mesh, ...] = ()
    ways: tuple[TensorWay, ...] = ()
    schema_version: int = SCHEMA_VERSION

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return max(self.placement) + 1 if self.placement else len(self.stages)

    @property
    def vp(self) -> int:
        """Most stages of a pipeline rank."""
        return max(self.placement.count(row) for row in range(self.pp)) if self.placement else 1

    @property
    def one_chunk(self) -> "Plan":
        """The plan that `certificate` speaks of, under 1F1B where this one has several chunks per rank."""
        proof = self.chunk_certificate
        if proof is None:
            return self
        alone = replace(self, stages=proof.stages, placement=(), orders=(), schedule="1f1b")
        return replace(alone, schedule_certificate=None, chunk_certificate=None)

    @property
    def rank_count(self) -> int:
        """Ranks that work; with meshes, some before the last one may have no work."""
        if not self.meshes:
            return self.pp * self.dp * self.width
        return sum(self.mesh(self.stages_of(row)[0]).ranks for row in range(self.pp))

    @property
    def world(self) -> int:
        """One more than the last rank."""
        if not self.meshes:
            return self.rank_count
        return max(self.first_rank(stage) + self.mesh(stage).ranks for stage in range(len(self.stages)))

    @property
    def width(self) -> int:
        """Ranks of a stage in one replica, of modules without a mesh of their own."""
        return self.cp * self.tp

    @property
    def parts(self) -> int:
        """Into how many parts the replicas of all meshes together split a microbatch."""
        return lcm(self.dp, *(mesh.dp for mesh in self.meshes))

    @property
    def units(self) -> int:
        """Sets of replicas that do alike and hand nothing to each other."""
        return gcd(self.dp, *(mesh.dp for mesh in self.meshes))

    def mesh(self, stage: int) -> Mesh:
        """The mesh of the stage's modules."""
        for mesh in self.meshes:
            if any(module_of(layer) in mesh.modules for layer in self.stages[stage].layers[:1]):
                return mesh
        return self.base

    def border(self, tensor: str, source: int, target: int) -> Border:
        """What a tensor of a program (or its gradient) crosses from the stage that makes the activation to that which
        reads it; two meshes that are equal where there is no border."""
        producer, consumer = named_by_layers(tensor).replace("<", ">").split(">")
        key = producer, module_of(consumer)
        known = (one.way for one in self.ways if (one.producer, one.reader) == key)
        return Border(self.mesh(source), self.mesh(target), next(known, "copies"))

    @property
    def base(self) -> Mesh:
        """The mesh of all modules without one of their own."""
        return Mesh(modules=(), tp=self.tp, cp=self.cp, dp=self.dp, first_rank=0)

    def beside(self, stage: int) -> frozenset[str]:
        """Modules on the mesh of the stage."""
        own, apart = self.mesh(stage).modules, {name for mesh in self.meshes for name in mesh.modules}
        names = (module.name for module in self.scenario.model.modules)
        return frozenset(own or (name for name in names if name not in apart))

    def samples(self, stage: int) -> int:
        """Of a microbatch in one replica of the stage."""
        return self.microbatch_size * self.dp // self.mesh(stage).dp if self.meshes else self.microbatch_size

    @property
    def ranks_per_expert(self) -> int:
        """etp; while ep is 1 experts are split as everything else is."""
        modules = self.scenario.model.modules
        experts = any(module.transformer is not None and module.transformer.moe is not None for module in modules)
        return self.etp if self.ep > 1 or not experts else self.tp

    def layout(self, stage: int) -> Layout:
        """How the ranks of a stage share its layers."""
        mesh, first = self.mesh(stage), self.first_rank(stage)
        own = mesh.modules != ()
        return Layout(
            pools=self.scenario.cluster.pools_of(first, first + mesh.ranks - 1) or (0,),
            tp=mesh.tp,
            cp=mesh.cp,
            ep=mesh.ep if own else self.ep,
            etp=1 if own else self.etp,
            dp=mesh.dp,
            sharding=self.sharding,
            spread=mesh.spread if own else self.spread,
            patches=mesh.patches if own else self.patches,
            together=() if own else self.together,
            batch_factor=1 if own else self.batch_factor,
            recompute=self.stages[stage].recompute,
        )

    def is_ahead(self, stage: int) -> bool:
        """Whether the stage runs the microbatches of the next step."""
        return any(module_of(layer) in self.prefetch for layer in self.stages[stage].layers[:1])

    def rank(self, stage: int, replica: int, shard: int = 0) -> int:
        """The process that runs shard `shard` (cp index * tp + tp index) of `stage` in `replica`."""
        return self.first_rank(stage) + replica * self.mesh(stage).width + shard

    def first_rank(self, stage: int) -> int:
        """The first rank of a stage."""
        row = self.row(stage)
        if not self.meshes:
            return row * self.dp * self.width
        mesh = self.mesh(stage)
        same = {self.row(other) for other in range(len(self.stages)) if self.mesh(other) == mesh}
        return mesh.first_rank + sum(other < row for other in same) * mesh.ranks

    def row(self, stage: int) -> int:
        """The pipeline rank of a stage."""
        return self.placement[stage] if self.placement else stage

    def stages_of(self, row: int) -> tuple[int, ...]:
        """The stages of a pipeline rank."""
        return tuple(stage for stage in range(len(self.stages)) if self.row(stage) == row)

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """All ranks of a stage, replica by replica."""
        first = self.first_rank(stage)
        return tuple(range(first, first + self.mesh(stage).ranks))

    def stage_of_layer(self) -> dict[str, int]:
        return {layer: index for index, stage in enumerate(self.stages) for layer in stage.layers}


def module_of(layer: str) -> str:
    """The module of a layer id."""
    return layer.rpartition(".")[0]


_PLAN = TypeAdapter(Plan)
_SCENARIO = TypeAdapter(Scenario)


def scenario_hash(scenario: Scenario) -> str:
    """First 16 hex digits of the SHA-256 of the resolved scenario without its recipes, on which no plan depends."""
    # a constraint or a form that is not there leaves hashes of older plans as they are
    pins = scenario.constraints.modules or ()
    unsaid: dict[str, object] = {"modules": True} if scenario.constraints.modules == () else {}
    unsaid |= {"modules": {index: _unpinned(pin) for index, pin in enumerate(pins)}} if pins else {}
    recorded: dict[str, object] = {} if scenario.model.recorded is not None else {"recorded": True}
    unsplit = {} if scenario.model.recorded is not None else recorded | {"recorded_tp": True}
    alike = {"precision": True} if all(module.precision is None for module in scenario.model.modules) else {}
    one: dict[str, object] = {"projector": {"reads": True}}
    modules = {
        index: {"form": True, "audio": {"stride": True}, "vocabulary": {"elsewhere": True}} | usual
        if module.form is None and (module.audio is None or module.audio.stride == 2)
        else usual
        for index, module in enumerate(scenario.model.modules)
        for usual in (unsplit | alike | (one if module.projector and module.projector.reads == 1 else {}),)
    }
    unsaid |= {"patches": True} if scenario.constraints.patches == () else {}
    unsaid |= {"encode_together": True} if scenario.constraints.encode_together == () else {}
    unsaid |= {"prefetch": True} if scenario.constraints.prefetch == () else {}
    unsaid |= {"compression": True} if scenario.constraints.compression == ("none",) else {}
    unsaid |= {"fp8": True} if scenario.constraints.fp8 == ("none",) else {}
    unsaid |= {"sequence_parallel": True} if scenario.constraints.sequence_parallel == () else {}
    priced = {index for index, pool in enumerate(scenario.cluster.pools) if pool.price_per_hour is not None}
    pools = {index: {"price_per_hour"} for index in range(len(scenario.cluster.pools)) if index not in priced}
    technique = {"compression"} if scenario.technique.compression == "none" else set()
    excluded = {
        "recipes": True,
        "constraints": unsaid,
        "technique": technique,
        "model": {"modules": modules} | recorded,
        "cluster": {"pools": pools},
    }
    kept = _SCENARIO.dump_json(scenario, exclude=excluded)  # type: ignore[arg-type]
    return hashlib.sha256(kept).hexdigest()[:16]


def _unpinned(pin: OwnRanks) -> set[str]:
    """Degrees that older plans did not know."""
    return {name for name in ("cp", "ep") if not getattr(pin, name)}


def plan_document(plan: Plan) -> dict[str, object]:
    """The plan as JSON values, layer ids shortened to ranges."""
    document: dict[str, object] = _PLAN.dump_python(_with_ids(plan, shorten_ids), mode="json")
    return document


def plan_text(plan: Plan) -> str:
    """plan.json as text."""
    return _PLAN.dump_json(_with_ids(plan, shorten_ids), indent=1).decode() + "\n"


def _with_ids(plan: Plan, change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Plan:
    """The plan with the layer ids of all its stages shortened or expanded."""

    def changed(stages: tuple[StagePlan, ...]) -> tuple[StagePlan, ...]:
        return tuple(replace(stage, layers=change(stage.layers)) for stage in stages)

    proof = plan.chunk_certificate
    proof = None if proof is None else replace(proof, stages=changed(proof.stages))
    return replace(plan, stages=changed(plan.stages), chunk_certificate=proof)


def save_plan(plan: Plan, path: Path) -> None:
    """Write plan.json; the file appears whole or not at all."""
    write_file(path, plan_text(plan))


def load_plan(path: Path) -> Plan:
    """Read plan.json.

    Raises:
        InputError: the file is missing, is not a plan, has another schema version, or numbers that no plan can have.
    """
    text = read_text(path, "plan", MAX_PLAN_BYTES)
    try:
        plan = _PLAN.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        hint = (
            f"; `mmplan optimize {path.name} -o best.plan.json` makes one" if path.suffix in (".yaml", ".yml") else ""
        )
        message = f"not a plan: {first['msg']} (of {error.error_count()}){hint}"
        raise InputError(message, file=path, key=key) from error
    if plan.schema_version != SCHEMA_VERSION:
        raise InputError(f"schema version {plan.schema_version}, this mmplan reads {SCHEMA_VERSION}", file=path)
    _refuse_impossible_numbers(plan, path)
    try:
        return _with_ids(plan, expand_ids)
    except ValueError as error:
        raise InputError(str(error), file=path, key="stages") from error


def _refuse_impossible_numbers(plan: Plan, path: Path) -> None:
    """Times and bytes are finite and not negative; a gap may be negative, which is the checker's to judge."""
    parts: list[tuple[str, StagePlan | Certificate | ChunkCertificate]] = [("certificate", plan.certificate)]
    parts += [(f"stages.{index}", stage) for index, stage in enumerate(plan.stages)]
    if plan.chunk_certificate is not None:
        parts += [("chunk_certificate", plan.chunk_certificate)]
    for where, part in parts:
        for key in (item.name for item in fields(part)):
            value = getattr(part, key)
            least = {"gap": -LARGEST_NUMBER, "capacity_bytes": 1}.get(key, 0)
            if isinstance(value, int | float) and not least <= value < LARGEST_NUMBER:
                message = f"not a plan: expected a number of at least {least}, found {shown(value)}"
                raise InputError(message, file=path, key=f"{where}.{key}")
