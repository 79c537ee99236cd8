"""Samples drawn from `Data`: the same for the simulator and for every rank of a run.

Sample `i` depends on the seed and on `i` alone, so ranks need not exchange sizes.
"""

import random
from collections.abc import Sequence
from functools import lru_cache

from mmplan.scenario.scenario import Data, Distribution, Sample, Scenario

REFERENCE_SAMPLES = 2048  # standard error of a mean below 2.3 % of one standard deviation
REFERENCE_SEED = 0


def draw_samples(data: Data, seed: int, first: int, count: int) -> tuple[Sample, ...]:
    """Samples `first` to `first + count - 1`; manifests are read in order, again from the start at their end."""
    if data.manifest:
        return tuple(data.manifest[index % len(data.manifest)] for index in range(first, first + count))
    return tuple(_draw(data, seed, index) for index in range(first, first + count))


@lru_cache(maxsize=8)
def reference_samples(data: Data) -> tuple[Sample, ...]:
    """What means are taken over: one sample if all sizes are fixed, all rows of a manifest, else 2,048 draws."""
    if data.manifest:
        return data.manifest
    parts = (data.text_tokens, data.images, data.audio_clips, data.audio_s, data.speech_tokens)
    fixed = all(len(part.values) == 1 for part in parts) and len(data.image_sizes) <= 1
    return draw_samples(data, REFERENCE_SEED, 0, 1 if fixed else REFERENCE_SAMPLES)


def microbatch_samples(
    scenario: Scenario, *, dp: int, microbatch_size: int, step: int
) -> tuple[tuple[tuple[Sample, ...], ...], ...]:
    """Samples of optimizer step `step` as [replica][microbatch][sample].

    Sample k of a microbatch has the global index step * global_batch + replica * (microbatches * microbatch_size)
    + microbatch * microbatch_size + k. ValueError when dp * microbatch_size does not divide the global batch.
    """
    if scenario.global_batch % (dp * microbatch_size):
        raise ValueError(f"global batch {scenario.global_batch} is not a multiple of {dp} x {microbatch_size}")
    per_replica = scenario.global_batch // dp
    samples = draw_samples(scenario.data, scenario.seed, step * scenario.global_batch, scenario.global_batch)
    return tuple(
        _cut(samples[replica * per_replica : (replica + 1) * per_replica], microbatch_size) for replica in range(dp)
    )


def _cut(samples: Sequence[Sample], size: int) -> tuple[tuple[Sample, ...], ...]:
    return tuple(tuple(samples[start : start + size]) for start in range(0, len(samples), size))


def _draw(data: Data, seed: int, index: int) -> Sample:
    """One sample. `random.Random` of a text is the same on every platform and Python version."""
    stream = random.Random(f"mmplan {seed} {index}")
    text_tokens = int(_choose(data.text_tokens, stream))
    images = int(_choose(data.images, stream))
    clips = int(_choose(data.audio_clips, stream))
    speech_tokens = int(_choose(data.speech_tokens, stream))
    return Sample(
        text_tokens=text_tokens,
        images=tuple(data.image_sizes[int(stream.random() * len(data.image_sizes))] for _ in range(images)),
        audio_s=tuple(_choose(data.audio_s, stream) for _ in range(clips)),
        speech_tokens=speech_tokens,
    )


def _choose(distribution: Distribution, stream: random.Random) -> float:
    if len(distribution.values) == 1:
        return distribution.values[0]
    target, total = stream.random(), 0.0
    for value, weight in zip(distribution.values, distribution.weights, strict=True):
        total += weight
        if target < total:
            return value
    return next(v for v, w in zip(reversed(distribution.values), reversed(distribution.weights), strict=True) if w > 0)
