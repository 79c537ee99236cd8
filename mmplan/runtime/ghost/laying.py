"""A user's own model laid over a plan: its pieces on the plan's layers, and what ranks share of its units."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layer import splits_rows
from mmplan.errors import InputError
from mmplan.planner.plan import Plan
from mmplan.runtime.ghost.adapters import refuse_adapters
from mmplan.runtime.ghost.alignment import align, used_pieces
from mmplan.runtime.ghost.expert_trials import experts_of, find_expert_splits
from mmplan.runtime.ghost.held_experts import held_experts
from mmplan.runtime.ghost.holdings import Holdings, dealt_parameters, holdings
from mmplan.runtime.ghost.image_calls import ImageCalls, around
from mmplan.runtime.ghost.job import Job
from mmplan.runtime.ghost.joined_images import ImageRanks
from mmplan.runtime.ghost.own_rows import RowRanks
from mmplan.runtime.ghost.recording import Batch, Call, Recorder, Recording
from mmplan.runtime.ghost.row_trials import RowWays
from mmplan.runtime.ghost.rows_of_units import RowsOfUnits
from mmplan.runtime.ghost.sequence_linears import RowsOf
from mmplan.runtime.ghost.sequence_trials import SequenceWays
from mmplan.runtime.ghost.split_experts import ExpertSplit
from mmplan.runtime.ghost.split_linears import Split, model_cuts
from mmplan.runtime.ghost.splits import Found, find_splits
from mmplan.runtime.ghost.traffic import Owners
from mmplan.runtime.ghost.types_of_pieces import recorded_in, set_types, types_of
from mmplan.runtime.ghost.units import find_units, parameter_names
from mmplan.runtime.ghost.vocabulary import Vocabulary, find_vocabulary
from mmplan.runtime.ghost.weightless import build_weightless
from mmplan.runtime.places import Place
from mmplan.runtime.tensor_sums import TensorRanks


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Laid:
    """A real model laid over a plan; of its units on this rank `splits`: what tp ranks share, `elsewhere`: of units of
    other stages, `experts`: what ep ranks do; `rows`: how they run on a rank's rows; `images`: ranks that take images
    of modules in turn; `vocabulary`: what they have some ids of; `floats`: the type of batches."""

    model: nn.Module
    floats: torch.dtype
    recorder: Recorder
    owners: Owners
    held: Holdings
    splits: Mapping[str, Sequence[Split]]
    experts: Mapping[str, ExpertSplit]
    elsewhere: Mapping[str, Sequence[Split]] = field(default_factory=dict)
    ranks: TensorRanks | None = None
    rows: RowsOfUnits | None = None
    images: ImageRanks | None = None
    vocabulary: Vocabulary | None = None

    @property
    def sequence(self) -> SequenceWays | None:
        """How units run on a tensor-parallel rank's rows."""
        return self.rows if isinstance(self.rows, SequenceWays) else None


def lay(plan: Plan, job: Job, graph: ComputationGraph, first: Sequence[Batch]) -> tuple[Laid, tuple[Recording, ...]]:
    """The model without weights, its units recorded and laid onto the plan's layers; and those recordings."""
    model, types = build_weightless(job.model, plan.scenario.seed), types_of(plan.scenario)
    # Ranks that share blocks record on a model of their own, whose blocks are whole.
    alone = all(layout.tp * layout.cp * layout.ep == 1 for layout in map(plan.layout, range(len(plan.stages))))
    recorded = model if alone else build_weightless(job.model, plan.scenario.seed)
    for parameter in (*model.parameters(), *recorded.parameters()):
        parameter.data = parameter.data.to(types.between)
    recorder = Recorder(recorded, find_units(recorded))
    recordings = tuple(recorder.record(cast_batch(batch, types.between)) for batch in first)
    layer_of = align(graph, model, recordings)
    if types.unlike:
        for one in {id(one): one for one in (model, recorded)}.values():
            set_types(one, find_units(one).keys(), graph, layer_of, types)
        recorder = Recorder(recorded, find_units(recorded))
        recordings = recorded_in(plan.scenario, recorder, [cast_batch(batch, types.between) for batch in first])
    refuse_adapters(plan, graph, model, layer_of)
    losses = [layer.id for layer in graph.layers() if layer.kind in ("loss", "end")]
    owners = Owners(layer_of=layer_of, loss_layer=losses[-1], used=frozenset(used_pieces(recordings)) & layer_of.keys())
    layers = {piece: graph.layer(layer) for piece, layer in layer_of.items()}
    held = holdings(
        plan,
        graph,
        model,
        owners,
        recordings,
        trainable={piece for piece, layer in layers.items() if layer.trainable},
        returning={piece for piece, layer in layers.items() if layer.has_backward},
    )
    laid = Laid(model=model, floats=types.between, recorder=recorder, owners=owners, held=held, splits={}, experts={})
    return laid, recordings


def share(
    plan: Plan,
    graph: ComputationGraph,
    laid: tuple[Laid, tuple[Recording, ...]],
    at: Place,
    stages: Sequence[int],
    ranks: TensorRanks | None,
    device: torch.device,
    first: Sequence[Batch],
    note: Callable[[str], None],
) -> tuple[Laid, tuple[Recording, ...]]:
    """What ranks share of the units of some stages of one mesh, and recordings of a rank's own. Collective over these
    ranks.

    Args:
        laid: as `lay` has it.
        note: is told what stays whole on tensor-parallel ranks.

    Raises:
        InputError: they cannot share them as the plan says.
    """
    mine, recordings = laid
    layout = plan.layout(stages[0])
    if ranks is not None and layout.tp * layout.ep > 1:
        mine = _share_out(plan, graph, mine, at, stages, ranks, device, note)
    if ranks is not None and layout.tp > 1:
        mine, recordings = _share_vocabulary(plan, graph, (mine, recordings), stages, ranks, device, first)
    if ranks is not None and ranks.spread:
        mine, recordings = _deal_images(plan, mine, ranks, device, first)
    if ranks is not None and ranks.context is not None:
        over = RowRanks(ranks, ranks.context)
        mine, recordings = _cut_rows(plan, mine, graph, stages, over, device, first)
    if ranks is not None and ranks.sequence:
        candidates = _with_rows(plan, graph, mine, stages, ranks)
        if candidates:
            mine, recordings = _scatter_rows(mine, candidates, ranks, device, first, note)
    return mine, recordings


def _share_out(
    plan: Plan,
    graph: ComputationGraph,
    laid: Laid,
    at: Place,
    stages: Sequence[int],
    ranks: TensorRanks,
    device: torch.device,
    note: Callable[[str], None],
) -> Laid:
    """With the splits of the rank's units. Collective over the ranks that share them.

    Raises:
        InputError: there are blocks among them, and none can be split; experts are not understood; or
            stages share what is split.
    """
    here, layout = {piece for stage in stages for piece in laid.held.pieces[stage]}, plan.layout(stages[0])
    units = [name for name in find_units(laid.model) if name in (here & laid.owners.used) - dealt_pieces(plan, laid)]
    experts = experts_of(laid.recorder, {name: graph.layer(laid.owners.layer_of[name]) for name in units}, layout.ep)
    found, elsewhere = Found(splits={}, whole=()), dict[str, Sequence[Split]]()
    if layout.tp > 1:
        apart = {name: one.members for name, one in experts.items()}
        found = find_splits(laid.recorder, units, ranks, device, apart)
        # Stages hand each other rows: all know of all units.
        others = _with_rows(plan, graph, laid, stages, ranks) - set(units)
        elsewhere |= find_splits(
            laid.recorder, [n for n in find_units(laid.model) if n in others], ranks, device
        ).splits
    if found.whole and not found.splits:
        raise InputError(
            f"the plan has tp={layout.tp}, and no block can be split over so many ranks: {found.whole[0]}: set "
            "`constraints.tp: [1]` in the scenario and optimize again"
        )
    for text in found.whole:
        note(f"stays whole on each of the {layout.tp} tensor-parallel ranks: {text}")
    shared = find_expert_splits(laid.recorder, experts, found.splits, ranks, at.replica, device)
    held = replace(
        laid.held,
        cuts=model_cuts(found.splits, laid.model, layout.tp),
        experts=None if ranks.experts is None else held_experts(shared, ranks.experts),
    )
    in_parts = held.cuts.keys() | (set() if held.experts is None else held.experts.here | held.experts.away)
    cut = [name for tie in held.ties for name in tie.names if name in in_parts]
    if cut:
        raise InputError(
            f"'{cut[0]}' is shared by several stages and split over the ranks of each (tp={layout.tp}, "
            f"ep={layout.ep}), and this release does one of both: set `constraints.tp: [1]` and `constraints.ep: [1]` "
            "in the scenario and optimize again"
        )
    return replace(laid, held=held, splits=found.splits, elsewhere=elsewhere, experts=shared, ranks=ranks)


def _share_vocabulary(
    plan: Plan,
    graph: ComputationGraph,
    before: tuple[Laid, tuple[Recording, ...]],
    stages: Sequence[int],
    ranks: TensorRanks,
    device: torch.device,
    first: Sequence[Batch],
) -> tuple[Laid, tuple[Recording, ...]]:
    """Token tables and heads of which each rank has some ids; the batches are recorded again so. Collective over these
    ranks."""
    laid, recordings = before
    here = {piece for stage in stages for piece in laid.held.pieces[stage]} & laid.owners.used
    here -= dealt_pieces(plan, laid)
    layers = {name: graph.layer(laid.owners.layer_of[name]) for name in find_units(laid.model) if name in here}
    with_loss = next(stage.layers for stage in plan.stages if laid.owners.loss_layer in stage.layers)
    heads = [name for name, layer in layers.items() if layer.kind == "head" and layer.id in with_loss]
    found, recordings = find_vocabulary(
        laid.recorder,
        tables=[name for name, layer in layers.items() if layer.kind == "token_embed"],
        heads=heads if ranks.context is None else (),
        apart={name for tie in laid.held.ties for name in tie.names},
        recordings=recordings,
        record=lambda: tuple(laid.recorder.record(cast_batch(batch, laid.floats)) for batch in first),
        ranks=ranks,
        device=device,
    )
    if found is None:
        return laid, recordings
    held = replace(
        laid.held,
        cuts={**laid.held.cuts, **found.cuts(laid.model)},
        logits=frozenset(layers[head].module for head in found.heads),
    )
    return replace(laid, held=held, vocabulary=found), recordings


def _with_rows(plan: Plan, graph: ComputationGraph, laid: Laid, stages: Sequence[int], ranks: TensorRanks) -> set[str]:
    """Units of which tensor-parallel ranks may each have rows, of all stages of the mesh."""
    mesh = plan.mesh(stages[0])
    here = {layer for index, stage in enumerate(plan.stages) if plan.mesh(index) == mesh for layer in stage.layers}
    layers = {
        name: graph.layer(laid.owners.layer_of[name])
        for name in find_units(laid.model)
        if name in laid.owners.used and laid.owners.layer_of[name] in here
    }
    return {
        name
        for name, layer in layers.items()
        if layer.module in ranks.sequence and splits_rows(layer) and not layer.has_experts
    }


def _scatter_rows(
    laid: Laid,
    candidates: Set[str],
    ranks: TensorRanks,
    device: torch.device,
    first: Sequence[Batch],
    note: Callable[[str], None],
) -> tuple[Laid, tuple[Recording, ...]]:
    """Units that ranks have split are run on a rank's rows where a trial allows it; the batches are recorded again so.
    Collective over these ranks.

    Raises:
        InputError: it allows it nowhere.
    """
    recorder, splits = laid.recorder, {**laid.elsewhere, **laid.splits}
    recorder.cut, recorder.parts = frozenset(candidates & splits.keys()), False

    def recorded() -> tuple[Recording, ...]:
        return tuple(recorder.record(cast_batch(batch, laid.floats)) for batch in first)

    recordings = recorded()
    ways = SequenceWays(recorder, splits, RowsOf(ranks), device)
    refused = ways.first_look(call for recording in recordings for call in recording.calls)
    if not recorder.cut - refused.keys():
        reason = next((f"'{name}' cannot be: {reason}" for name, reason in refused.items()), "no block is split")
        raise InputError(
            f"the plan has sequence_parallel over tp={ranks.degree}, and no block can be run on some rows of a "
            f"sequence: {reason}: write `sequence_parallel: false` in the constraints of the scenario and optimize "
            "again"
        )
    for reason in dict.fromkeys(refused.values()):
        names = [name for name, other in refused.items() if other == reason]
        note(
            f"runs on all rows of a sequence on each of the {ranks.degree} tensor-parallel ranks: {names[0]}: {reason}"
        )
    if refused:
        recorder.cut -= refused.keys()
        recordings = recorded()
    return replace(laid, rows=ways), recordings


def dealt_pieces(plan: Plan, laid: Laid) -> frozenset[str]:
    """Of modules whose images ranks take in turn."""
    return frozenset(piece for piece, layer in laid.owners.layer_of.items() if layer.split(".")[0] in plan.spread)


def _deal_images(
    plan: Plan, laid: Laid, ranks: TensorRanks, device: torch.device, first: Sequence[Batch]
) -> tuple[Laid, tuple[Recording, ...]]:
    """Units of modules that the plan deals out whole run on a rank's images; the batches are recorded again so.

    Raises:
        InputError: images depend on each other, or parameters are used or held elsewhere.
    """
    assert ranks.width is not None
    dealt, units = dealt_pieces(plan, laid), find_units(laid.model).keys() & laid.owners.used
    recorder = laid.recorder
    images = ImageCalls(recorder, around(recorder.model, units, dealt & units), ranks.width, device)
    recorder.images = images
    recordings = tuple(recorder.record(cast_batch(batch, laid.floats)) for batch in first)
    names = {name for piece in dealt for name in parameter_names(laid.model, piece)}
    _refuse_used_elsewhere(laid, names, dealt, recordings)
    held = replace(laid.held, dealt=dealt_parameters(laid.model, names, ranks.stage))
    at = ImageRanks(images.names, ranks, ranks.width)
    return replace(laid, held=held, images=at, ranks=ranks), recordings


def _refuse_used_elsewhere(laid: Laid, names: Set[str], dealt: Set[str], recordings: Sequence[Recording]) -> None:
    """Gradients of parameters are parts on each rank where they are used on its images, and whole elsewhere."""
    used = {
        name
        for recording in recordings
        for call in (*recording.calls, recording.loss)
        if call.unit not in dealt
        for name in call.parameters
    }
    used |= {name for tie in laid.held.ties for name in tie.names}
    others = {name for piece in laid.owners.layer_of.keys() - dealt for name in parameter_names(laid.model, piece)}
    shared = {id(laid.model.get_parameter(name)) for name in used | others}
    if wrong := sorted(name for name in names if id(laid.model.get_parameter(name)) in shared):
        raise InputError(
            f"the plan lets ranks take images in turn, and '{wrong[0]}' is also used outside of the modules that they "
            "take them of: set `constraints.spread: []` in the scenario and optimize again"
        )


def _cut_rows(
    plan: Plan,
    laid: Laid,
    graph: ComputationGraph,
    stages: Sequence[int],
    ranks: RowRanks,
    device: torch.device,
    first: Sequence[Batch],
) -> tuple[Laid, tuple[Recording, ...]]:
    """Units of layers that split their rows are run on these; the batches are recorded again so. Collective over the
    ranks that have other rows.

    Raises:
        InputError: a unit mixes rows.
    """
    recorder = laid.recorder
    layers = {
        name: graph.layer(laid.owners.layer_of[name]) for name in find_units(laid.model) if name in laid.owners.used
    }
    recorder.cut = frozenset(name for name, layer in layers.items() if splits_rows(layer))
    recordings = tuple(recorder.record(cast_batch(batch, laid.floats)) for batch in first)
    ways = RowWays(recorder, ranks, device)
    for recording in recordings:
        ways.look(own_calls(laid, stages, recording))
    return replace(laid, rows=ways), recordings


def own_calls(laid: Laid, stages: Sequence[int], recording: Recording) -> list[Call]:
    """Those of the units of some stages."""
    here = {piece for stage in stages for piece in laid.held.pieces[stage]} & laid.owners.used
    return [call for call in recording.calls if call.unit in here]


def cast_batch(batch: Batch, dtype: torch.dtype) -> Batch:
    """Floats in the model's own type."""
    return {
        key: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in batch.items()
    }
