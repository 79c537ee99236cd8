"""Frameworks with one sequence length fill samples up to the longest one, where their loader does not pack."""

from dataclasses import replace
from functools import lru_cache

from mmplan.cost_models.loads import sequence_lengths
from mmplan.planner.formats.linearised import Draft, repriced
from mmplan.planner.plan import Plan
from mmplan.scenario.samples import reference_samples
from mmplan.scenario.scenario import Data, Model, ModelModule


def sequence_length(plan: Plan, module: ModelModule) -> int:
    """Tokens of the longest sample in the language model, rounded up to what cp and sequence parallelism divide."""
    unit = plan.tp * plan.cp * (2 if plan.cp > 1 else 1)
    return -(-max(sample_lengths(plan, module)) // unit) * unit


def padded(draft: Draft, module: ModelModule, target: str) -> Draft:
    """Every sample as long as the longest."""
    scenario = draft.plan.scenario
    samples, lengths = reference_samples(scenario.data), sample_lengths(draft.plan, module)
    longest = sequence_length(draft.plan, module)
    if len(samples) == 1 or min(lengths) == longest:
        return draft
    filled = tuple(
        replace(sample, text_tokens=sample.text_tokens + longest - length)
        for sample, length in zip(samples, lengths, strict=True)
    )
    other = replace(scenario, data=replace(scenario.data, manifest=filled))
    mean = sum(lengths) / len(lengths)
    sentence = f"{target} fills every sample up to {longest} tokens, of {mean:.0f} on average, unless your loader packs"
    return draft.changed(repriced(draft.plan, scenario=other), sentence)


def sample_lengths(plan: Plan, module: ModelModule) -> tuple[int, ...]:
    """Tokens of each reference sample in the language model."""
    return _lengths(plan.scenario.model, plan.scenario.data, module.name)


@lru_cache(maxsize=16)
def _lengths(model: Model, data: Data, module: str) -> tuple[int, ...]:
    return tuple(sum(sequence_lengths(model, sample)[module]) for sample in reference_samples(data))
