"""The modality of each stage, by which pictures and traces tell stages apart."""

from mmplan.planner.plan import Plan


def stage_modality(plan: Plan, stage: int) -> str:
    """The modality that most layers of the stage belong to."""
    counts: dict[str, int] = {}
    for layer in plan.stages[stage].layers:
        modality = plan.scenario.model.module(layer.rsplit(".", 1)[0]).modality
        counts[modality] = counts.get(modality, 0) + 1
    return max(counts, key=lambda modality: counts[modality])


def stage_modalities(plan: Plan) -> dict[int, str]:
    """That of every stage."""
    return {stage: stage_modality(plan, stage) for stage in range(len(plan.stages))}
