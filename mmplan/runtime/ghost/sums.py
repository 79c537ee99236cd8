"""What a stage of a user's own model exchanges with the ranks that share its layers, foreseen from recordings."""

from mmplan.planner.plan import Plan
from mmplan.runtime.ghost.joined_images import ImageSums
from mmplan.runtime.ghost.laying import Laid
from mmplan.runtime.ghost.row_bytes import RowSums
from mmplan.runtime.ghost.row_trials import RowWays
from mmplan.runtime.ghost.sequence_bytes import SequenceSums
from mmplan.runtime.ghost.split_bytes import SplitSums
from mmplan.runtime.ghost.stage import JointSums, StageSums
from mmplan.runtime.ghost.vocabulary import VocabularySums


def sums_of(plan: Plan, laid: Laid, stage: int, own: frozenset[str], recomputed: frozenset[str]) -> StageSums:
    """What a stage exchanges with the ranks that share its layers."""
    splits = {name: splits for name, splits in laid.splits.items() if name in own}
    in_rows = laid.recorder.cut if laid.sequence is not None else frozenset[str]()
    of_splits = SplitSums(
        model=laid.model,
        splits={name: splits for name, splits in splits.items() if name not in in_rows},
        experts={name: split for name, split in laid.experts.items() if name in own},
        ranks=laid.ranks,
        recomputed=recomputed,
        trained=laid.held.trained,
        ways=laid.rows if isinstance(laid.rows, RowWays) else None,
    )
    sums: StageSums = of_splits
    if laid.images is not None:
        of_images = ImageSums(
            model=laid.model,
            units=own,
            trained=laid.held.trained,
            computes_loss=laid.owners.loss_layer in plan.stages[stage].layers,
            over_cp=plan.layout(stage).cp > 1,
        )
        sums = JointSums(of_splits, of_images)
    if laid.vocabulary is not None:
        of_ids = VocabularySums(model=laid.model, vocabulary=laid.vocabulary, units=own, trained=laid.held.trained)
        sums = JointSums(sums, of_ids)
    if laid.sequence is not None:
        of_sequence = SequenceSums(
            model=laid.model,
            ways=laid.sequence,
            splits={name: splits for name, splits in splits.items() if name in in_rows},
            recomputed=recomputed,
            trained=laid.held.trained,
        )
        return JointSums(sums, of_sequence)
    if not isinstance(laid.rows, RowWays):
        return sums
    of_rows = RowSums(
        model=laid.model,
        ways=laid.rows,
        units=own,
        recomputed=recomputed,
        trained=laid.held.trained,
        computes_loss=laid.owners.loss_layer in plan.stages[stage].layers,
        splits=splits,
    )
    return JointSums(sums, of_rows)
