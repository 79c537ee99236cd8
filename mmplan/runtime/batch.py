"""One microbatch of synthetic training data, as packed rows without padding.

Every value is a function of (seed, global sample index) alone, so each rank builds the parts its stage reads and all
ranks agree without sending data. The language-model sequence of a sample is its encoder tokens (in the order of the
merge edges), then its text. The task can be learned: text counts upwards in a small alphabet from a start that the
sample's images and clips carry as their mean.
"""

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

import torch
from torch import Tensor

from mmplan.cost_models.load import Loads
from mmplan.cost_models.loads import (
    audio_clip_frames,
    context_lengths,
    image_patch_counts,
    output_lengths,
    own_tokens,
    sequence_lengths,
)
from mmplan.runtime.dtypes import TORCH_DTYPES
from mmplan.scenario.scenario import Model, ModelModule, Sample, Scenario

NO_LABEL = -100  # torch's cross_entropy ignores this index by default
ALPHABET = 32  # token ids in use; few enough to be learned in some steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """What layers read besides activations; keys are module names.

    lengths: tokens of each sequence of the module (images, clips or samples), in packing order.
    raw_lengths: raw rows of each image or tile (patches) and clip (mel frames); encoders only.
    inputs: raw inputs, `[patches, channels * temporal_patch * patch^2]` float for vision, `[frames, mel_bins]` float
        for audio (clips packed), `[text tokens]` int64 ids for language models. Only those that were asked for.
    merge_positions: language model -> source (producer module or `"text"`) -> int64 rows of the packed sequence.
    labels: `[tokens]` int64, the next text token or -100 where there is no loss.
    targets_in_batch: labels other than -100 in the whole global batch (all replicas and microbatches of the step).
    context_lengths: language model with cross-attention -> context tokens of each sample; projector -> tokens of each
        sequence it reads.
    parts: replicas of another mesh -> loads of what each of these has of it, where modules have ranks of their own.
    """

    lengths: Mapping[str, tuple[int, ...]]
    raw_lengths: Mapping[str, tuple[int, ...]]
    inputs: Mapping[str, Tensor]
    merge_positions: Mapping[str, Mapping[str, Tensor]]
    labels: Mapping[str, Tensor]
    targets_in_batch: Mapping[str, int]
    context_lengths: Mapping[str, tuple[int, ...]]
    parts: Mapping[int, tuple[Loads, ...]] = field(default_factory=dict)

    def addresses(self) -> frozenset[int]:
        """Storage addresses of all its tensors, to tell them from activations."""
        tensors = [*self.inputs.values(), *self.labels.values()]
        tensors += [rows for positions in self.merge_positions.values() for rows in positions.values()]
        return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)


def joined(batches: Sequence[Microbatch], modules: Collection[str]) -> Microbatch:
    """Several microbatches in a row as one, as far as these modules read them."""
    names = [name for name in batches[0].lengths if name in modules]
    firsts = {name: [0, *accumulate(sum(batch.lengths[name]) for batch in batches)] for name in names}

    def cat(field: str) -> dict[str, tuple[int, ...]]:
        return {
            name: tuple(chain.from_iterable(getattr(batch, field)[name] for batch in batches))
            for name in names
            if name in getattr(batches[0], field)
        }

    return Microbatch(
        lengths=cat("lengths"),
        raw_lengths=cat("raw_lengths"),
        inputs={n: torch.cat([batch.inputs[n] for batch in batches]) for n in names if n in batches[0].inputs},
        merge_positions={
            name: {
                source: torch.cat([b.merge_positions[name][source] + f for b, f in zip(batches, first, strict=False)])
                for source in batches[0].merge_positions[name]
            }
            for name, first in firsts.items()
            if name in batches[0].merge_positions
        },
        labels={},
        targets_in_batch=batches[0].targets_in_batch,
        context_lengths=cat("context_lengths"),
    )


def make_microbatch(
    scenario: Scenario,
    samples: Sequence[Sample],
    *,
    indices: Sequence[int],
    targets_in_batch: Mapping[str, int],
    raw_modules: Collection[str],
    dtype: torch.dtype,
    device: torch.device,
    parts: Mapping[int, tuple[Loads, ...]] | None = None,
) -> Microbatch:
    """Data for `samples`.

    Args:
        indices: global index of each sample.
        raw_modules: modules whose raw inputs are made.
        dtype: of float inputs of modules without a precision of their own.
    """
    model = scenario.model
    per_sample = [sequence_lengths(model, sample) for sample in samples]
    readers = [module for module in model.modules if module.vocabulary is not None]
    drawn = {
        module.name: [_raw(scenario, module, sample, i) for i, sample in zip(indices, samples, strict=True)]
        for module in model.modules
        if module.name in raw_modules or module.kind == "language_model"
    }
    return Microbatch(
        lengths={m.name: tuple(n for lengths in per_sample for n in lengths[m.name]) for m in model.modules},
        raw_lengths={
            m.name: tuple(n for sample in samples for n in _raw_lengths(model, m, sample))
            for m in model.modules
            if m.vision is not None or m.audio is not None
        },
        inputs={
            name: _cast(torch.cat(parts), TORCH_DTYPES.get(model.module(name).precision or "", dtype), device)
            for name, parts in drawn.items()
            if name in raw_modules
        },
        merge_positions={m.name: _positions(model, m, samples, per_sample, device) for m in readers},
        labels={m.name: _labels(m, drawn[m.name], per_sample, device) for m in readers if m.kind == "language_model"},
        targets_in_batch=dict(targets_in_batch),
        context_lengths={
            m.name: tuple(n for sample in samples for n in context_lengths(model, m, sample))
            for m in model.modules
            if m.vocabulary is not None or m.projector is not None
        },
        parts=parts or {},
    )


def _cast(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)


def _raw_lengths(model: Model, module: ModelModule, sample: Sample) -> tuple[int, ...]:
    return image_patch_counts(model, module, sample) if module.vision is not None else audio_clip_frames(module, sample)


def _raw(scenario: Scenario, module: ModelModule, sample: Sample, index: int) -> Tensor:
    """Raw input of one sample: unit noise around the sample's start / ALPHABET, or counting token ids."""
    start = zlib.crc32(f"{scenario.seed}/{index}".encode()) % ALPHABET
    if module.vocabulary is not None:
        return (start + torch.arange(own_tokens(module, sample))) % min(ALPHABET, module.vocabulary.size)
    rows = sum(_raw_lengths(scenario.model, module, sample))
    generator = torch.Generator().manual_seed(zlib.crc32(f"{scenario.seed}/{index}/{module.name}".encode()))
    return torch.randn(rows, _raw_width(module), generator=generator) + start / ALPHABET


def _raw_width(module: ModelModule) -> int:
    if module.vision is not None:
        return module.vision.channels * module.vision.temporal_patch * module.vision.patch**2
    if module.audio is None:
        raise ValueError(f"module {module.name} has no raw input")
    return module.audio.mel_bins


def _positions(
    model: Model,
    module: ModelModule,
    samples: Sequence[Sample],
    per_sample: Sequence[Mapping[str, tuple[int, ...]]],
    device: torch.device,
) -> dict[str, Tensor]:
    """Rows of each source in the packed sequence: sample by sample, producers in edge order, then the own tokens."""
    producers = [e.producer for e in model.edges if e.consumer == module.name and e.kind in ("merge", "hidden")]
    rows: dict[str, list[Tensor]] = {source: [] for source in (*producers, "text")}
    first = 0
    for sample, lengths in zip(samples, per_sample, strict=True):
        counts = {name: sum(output_lengths(model.module(name), lengths[name])) for name in producers}
        counts["text"] = own_tokens(module, sample)
        for source, count in counts.items():
            rows[source].append(torch.arange(first, first + count))
            first += count
    return {source: torch.cat(parts).to(device) for source, parts in rows.items()}


def _labels(
    module: ModelModule,
    ids: Sequence[Tensor],
    per_sample: Sequence[Mapping[str, tuple[int, ...]]],
    device: torch.device,
) -> Tensor:
    """Each own token but the last of a sample predicts the next one; other rows have no label."""
    parts = []
    for own, lengths in zip(ids, per_sample, strict=True):
        labels = torch.full((sum(lengths[module.name]),), NO_LABEL)
        if len(own) > 1:
            labels[-len(own) : -1] = own[1:]
        parts.append(labels)
    return torch.cat(parts).to(device)
