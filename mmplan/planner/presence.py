"""Which modalities a microbatch may lack, how often, and its loads then."""

from collections.abc import Set
from itertools import combinations

from mmplan.cost_models.load import Loads
from mmplan.cost_models.loads import sample_loads
from mmplan.scenario.samples import reference_samples
from mmplan.scenario.scenario import Data, Modality, Sample, Scenario

_PARTS: dict[Modality, str] = {"vision": "images", "audio": "audio_s", "speech": "speech_tokens"}  # of a Sample
NAMES: dict[Modality, str] = {"vision": "images", "audio": "audio", "speech": "speech"}


def optional_modalities(scenario: Scenario, microbatch_size: int) -> dict[Modality, float]:
    """Modalities that some microbatch lacks and another has, with the fraction of microbatches that lack them.

    Modules without such an input (text) always run. Samples are taken as independent.
    """
    used = {module.modality for module in scenario.model.modules}
    samples = reference_samples(scenario.data)
    fractions: dict[Modality, float] = {}
    for modality, part in _PARTS.items():
        lacking = sum(not getattr(sample, part) for sample in samples) / len(samples)
        if modality in used and 0 < lacking < 1:
            fractions[modality] = lacking**microbatch_size
    return fractions


def patterns(modalities: Set[Modality]) -> tuple[frozenset[Modality], ...]:
    """Every set of missing modalities, the empty one first."""
    ordered = sorted(modalities)
    return tuple(frozenset(chosen) for size in range(len(ordered) + 1) for chosen in combinations(ordered, size))


def pattern_loads(scenario: Scenario, missing: Set[Modality]) -> Loads:
    """Loads of a microbatch of one sample that has everything but what is missing."""
    return sample_loads(scenario, [pattern_sample(scenario.data, missing)])


def pattern_sample(data: Data, missing: Set[Modality]) -> Sample:
    """One sample that has everything but what is missing; each part as in the first sample of the data with it."""
    samples = reference_samples(data)

    def part(modality: Modality, name: str, nothing: object) -> object:
        if modality in missing:
            return nothing
        return next((getattr(sample, name) for sample in samples if getattr(sample, name)), nothing)

    return Sample(
        text_tokens=max(sample.text_tokens for sample in samples),
        images=part("vision", "images", ()),  # type: ignore[arg-type]
        audio_s=part("audio", "audio_s", ()),  # type: ignore[arg-type]
        speech_tokens=part("speech", "speech_tokens", 0),  # type: ignore[arg-type]
    )


def disagreement(lacking: float, ranks: int, microbatches: int) -> float:
    """Probability that in one step some microbatch is there on one rank and lacks the modality on another."""
    return float(1 - (lacking**ranks + (1 - lacking) ** ranks) ** microbatches)
