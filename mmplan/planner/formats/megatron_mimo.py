"""A plan whose encoders have ranks of their own, as the module grids of Megatron-Bridge's MIMO (release 0.6).

A grid numbers its ranks tp, cp, dp, pp, the first fastest, from its offset on: as a plan numbers those of a mesh's
stages. A microbatch is one for all grids and each slices it over its own dp (`micro_batch_size` counts all slices), as
meshes of a plan do. The rules of `MegatronMIMOParallelismConfig.finalize` are kept here in the words of the plan; that
every grid has one encoder, ranks of its own and whole samples nobody checks there before a run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mmplan.errors import CheckError
from mmplan.planner.check import require_structure
from mmplan.planner.formats.exported import Exported, Loss
from mmplan.planner.formats.language_chain import language_stages, the_language_model, without_spread
from mmplan.planner.formats.linearised import Draft, each_alone, repriced, require_fit
from mmplan.planner.formats.megatron_layout import layout_text
from mmplan.planner.formats.megatron_recompute import recompute_words
from mmplan.planner.formats.megatron_rules import experts_with_sequence_parallel, refuse_adapters
from mmplan.planner.formats.simple_schedule import under_1f1b
from mmplan.planner.formats.torchrun_head import title
from mmplan.planner.formats.unsaid import unsaid
from mmplan.planner.plan import Plan, module_of
from mmplan.scenario.scenario import ModelModule

TARGET = "Megatron MIMO"
VERSION = "megatron-bridge 0.6, megatron-core 0.19"
LANGUAGE = "language"  # MIMO_LANGUAGE_MODULE_KEY
NAMES = {"vision_encoder": "images", "audio_encoder": "audios"}  # as in Megatron-Bridge's llava_provider


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The ranks of one MIMO module; `modules` of the plan lie there, in `stages`."""

    name: str
    modules: tuple[str, ...]
    stages: tuple[int, ...]
    tp: int
    cp: int
    dp: int
    offset: int
    ep: int = 1
    etp: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.dp * len(self.stages)


def export_megatron_mimo(plan: Plan) -> Exported:
    """`mimo_plan.py` with the grids and what the language model's provider has to be told; `components.args` with the
    same grids as words for Megatron-Bridge's example scripts.

    Raises:
        CheckError: encoders share ranks with other modules, or a rule of MIMO is broken.
    """
    require_structure(plan)
    module = the_language_model(plan, TARGET)
    _refuse(plan)
    draft = under_1f1b(each_alone(plan, TARGET), TARGET, chunks=False)
    draft = _table_beside_blocks(_sharded(experts_with_sequence_parallel(draft, module, TARGET)), module)
    made, spread = _as_replicas(draft)
    grids = module_grids(made.plan, module, spread)
    _check(made.plan, grids)
    require_fit(made.plan, TARGET)
    provider, losses, notes = _provider(made.plan, module, grids)
    files = {"mimo_plan.py": _module(made.plan, grids, provider), "components.args": _components(grids)}
    return Exported(
        target="megatron-mimo",
        version=VERSION,
        files=files,
        losses=(*made.losses, *losses, *unsaid(plan, "megatron-mimo")),
        notes=(*_notes(), *notes),
    )


def _refuse(plan: Plan) -> None:
    model = plan.scenario.model
    if all(module.kind == "language_model" for module in model.modules):
        raise CheckError(f"{TARGET} places encoders beside a language model; {model.name} has none: see --to megatron")
    for edge in model.edges:
        if edge.kind == "add":
            raise CheckError(
                f"{TARGET} hands on the last output of an encoder alone; {edge.producer} adds another one's to block "
                f"{edge.consumer_layer} of {edge.consumer}"
            )
    refuse_adapters(plan, TARGET)


def _sharded(draft: Draft) -> Draft:
    if draft.plan.sharding not in ("gradients", "parameters"):
        return draft
    sentence = f"{TARGET} shards the optimizer's state, the plan its {draft.plan.sharding} too"
    return draft.changed(repriced(draft.plan, sharding="optimizer"), sentence)


def _table_beside_blocks(draft: Draft, module: ModelModule) -> Draft:
    """The token table is the language model's: from behind an encoder it moves to the first blocks."""
    plan, table = draft.plan, f"{module.name}.embed"
    held = language_stages(plan, module)
    stage = next(index for index, one in enumerate(held) if one.embedding)
    if not held[stage].others or held[stage].blocks or held[stage].head:
        return draft
    after = next(index for index, one in enumerate(held) if one.blocks or one.head)
    cut = [tuple(layer for layer in one.layers if layer != table) for one in plan.stages]
    cut[after] = (table, *cut[after])
    made = repriced(plan, stages=cut, levels=[one.recompute for one in plan.stages])
    return draft.changed(made, f"{TARGET} has the token table on the ranks of the language model")


def _as_replicas(draft: Draft) -> tuple[Draft, tuple[str, ...]]:
    """Modules whose samples the plan deals out over tp and cp are replicas of a grid of their own with tp 1; where a
    microbatch has too few samples for that, they are split by tp instead."""
    plan = draft.plan
    if not plan.spread or plan.width == 1:
        return draft, ()
    if plan.microbatch_size % plan.width == 0 and not plan.patches and all(_whole(plan, name) for name in plan.spread):
        return draft, plan.spread
    return without_spread(draft, TARGET), ()


def _whole(plan: Plan, name: str) -> bool:
    """Whether all modules beside a spread one, in its stages, are spread too."""
    held = [{module_of(layer) for layer in stage.layers} for stage in plan.stages]
    return all(modules <= set(plan.spread) for modules in held if name in modules)


def module_grids(plan: Plan, module: ModelModule, spread: Sequence[str] = ()) -> tuple[Grid, ...]:
    """One grid for each encoder with its projectors, and one of the language model.

    Raises:
        CheckError: a pipeline rank holds layers of two of them.
    """
    branches = _branches(plan, module)
    stages_of: dict[str, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        names = {branches[module_of(layer)] for layer in stage.layers}
        if len(names) > 1:
            held = dict.fromkeys(module_of(layer) for layer in stage.layers)
            raise CheckError(f"{TARGET} gives every module ranks of its own; stage {index} holds {' and '.join(held)}")
        stages_of.setdefault(names.pop(), []).append(index)
    grids = []
    for name, stages in stages_of.items():
        mesh, language = plan.mesh(stages[0]), name == LANGUAGE
        firsts = [plan.first_rank(stage) for stage in stages]
        if firsts != [firsts[0] + place * mesh.ranks for place in range(len(firsts))]:
            raise CheckError(f"{TARGET} numbers the ranks of {name} without a gap; its stages begin at ranks {firsts}")
        if mesh.spread:
            raise CheckError(
                f"{TARGET} deals out whole samples to an encoder's ranks, the plan has {' and '.join(mesh.modules)} on "
                f"{mesh}: set `constraints.modules: {{{mesh.modules[0]}: {{cp: 1}}}}` and optimize again"
            )
        members = tuple(one for one, branch in branches.items() if branch == name)
        whole = any(member in spread for member in members)
        grids.append(
            Grid(
                name=name,
                modules=members,
                stages=tuple(stages),
                tp=1 if whole else mesh.tp,
                cp=1 if whole else mesh.cp,
                dp=mesh.ranks if whole else mesh.dp,
                offset=firsts[0],
                ep=plan.ep if language else 1,
                etp=plan.ranks_per_expert if language else 1,
            )
        )
    return tuple(sorted(grids, key=lambda grid: grid.offset))


def _branches(plan: Plan, module: ModelModule) -> dict[str, str]:
    """Module of the plan -> MIMO module: projectors belong to their encoder."""
    model, found = plan.scenario.model, {module.name: LANGUAGE}
    kinds = [one.kind for one in model.modules]
    for one in model.modules:
        root = one
        while root.projector is not None:
            producer = next(edge.producer for edge in model.edges if edge.consumer == root.name)
            root = model.module(producer)
        if root.kind != "language_model":
            found[one.name] = NAMES.get(root.kind, root.name) if kinds.count(root.kind) == 1 else root.name
    return found


def _check(plan: Plan, grids: Sequence[Grid]) -> None:
    """Rules of MIMO and of its data loader."""
    expected, together = 0, plan.microbatch_size * plan.dp
    for grid in grids:
        if grid.tp & (grid.tp - 1):
            raise CheckError(f"{TARGET} wants powers of two: {grid.name} has tp={grid.tp}")
        if grid.offset != expected:
            raise CheckError(f"{TARGET} wants every rank at work: ranks {expected} to {grid.offset - 1} have no module")
        if together % grid.dp:
            share = f"dp={plan.dp} x {plan.microbatch_size} samples / dp={grid.dp} = {together / grid.dp:g}"
            raise CheckError(f"{TARGET} deals out whole samples: a replica of {grid.name} would get {share}")
        expected = grid.offset + grid.ranks
    for one in grids:
        for other in grids:
            if max(one.dp, other.dp) % min(one.dp, other.dp):
                raise CheckError(
                    f"{TARGET}: {one.name} has dp={one.dp}, {other.name} dp={other.dp}, and neither divides the other"
                )


def _provider(
    plan: Plan, module: ModelModule, grids: Sequence[Grid]
) -> tuple[dict[str, object], tuple[Loss, ...], tuple[str, ...]]:
    """Fields of the language model's provider (TransformerConfig), what they cost and what to know."""
    language = next(grid for grid in grids if grid.name == LANGUAGE)
    own = replace(plan, stages=tuple(plan.stages[stage] for stage in language.stages), placement=(), meshes=())
    recompute = recompute_words(own, module, TARGET)
    fields: dict[str, object] = {}
    if len(own.stages) > 1:
        fields["pipeline_model_parallel_layout"] = layout_text(language_stages(own, module))
    values = iter(recompute.words)
    for flag in values:
        name, value = flag.removeprefix("--").replace("-", "_"), next(values)
        fields[name] = int(value) if value.isdigit() else [value] if name == "recompute_modules" else value
    fields["sequence_parallel"] = plan.scenario.technique.sequence_parallel and language.tp > 1
    return fields, recompute.losses, recompute.notes


def _module(plan: Plan, grids: Sequence[Grid], provider: dict[str, object]) -> str:
    """The Python file."""
    each = ((f'            "{grid.name}": ModuleParallelismConfig(', _fields(grid)) for grid in grids)
    entries = "".join(f"{opened}\n{fields}            ),\n" for opened, fields in each)
    told = "".join(f'    "{name}": {value!r},\n' for name, value in provider.items()).replace("'", '"')
    return f'''"""{title(plan, TARGET)}."""

from megatron.bridge.models.megatron_mimo.megatron_mimo_config import (
    MegatronMIMOParallelismConfig,
    ModuleParallelismConfig,
)

WORLD_SIZE = {sum(grid.ranks for grid in grids)}
MICRO_BATCH_SIZE = {plan.microbatch_size * plan.dp}  # of all replicas together, as MIMO's loader slices it
GLOBAL_BATCH_SIZE = {plan.scenario.global_batch}
USE_DISTRIBUTED_OPTIMIZER = {plan.sharding == "optimizer"}

# Fields of the language model's provider.
LANGUAGE_PROVIDER = {{
{told}}}


def parallelism() -> MegatronMIMOParallelismConfig:
    """Which ranks run which module."""
    return MegatronMIMOParallelismConfig(
        module_parallelisms={{
{entries}        }}
    )
'''


def _fields(grid: Grid) -> str:
    values = {
        "tensor_model_parallel_size": grid.tp,
        "pipeline_model_parallel_size": len(grid.stages),
        "context_parallel_size": grid.cp,
        "expert_model_parallel_size": grid.ep,
        "expert_tensor_parallel_size": grid.etp,
        "data_parallel_size": grid.dp,
        "rank_offset": grid.offset,
    }
    return "".join(f"                {name}={value},\n" for name, value in values.items())


def _components(grids: Sequence[Grid]) -> str:
    lines = []
    for grid in grids:
        degrees = f"tp={grid.tp},pp={len(grid.stages)},cp={grid.cp},dp={grid.dp},rank_offset={grid.offset}"
        lines.append(f"--component {grid.name}={degrees}\n")
    return "".join(lines)


def _notes() -> tuple[str, ...]:
    return (
        "parallelism() is the provider's megatron_mimo_parallelism_config, LANGUAGE_PROVIDER is of its language model",
        "build the submodule specs and special tokens under the same module names; data and checkpoints are yours",
    )
