"""One microbatch of synthetic training data, as packed rows without padding.

Every value is a function of (seed, global sample index) alone, so each rank builds the parts its stage reads and all
ranks agree without sending data. The language-model sequence of a sample is its encoder tokens (in the order of the
merge edges), then its text.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """What layers read besides activations; keys are module names.

    lengths: tokens of each sequence of the module (images, clips or samples), in packing order.
    inputs: raw inputs, `[patches, channels * temporal_patch * patch^2]` float for vision, `[frames, mel_bins]` float
        for audio (clips packed), `[text tokens]` int64 ids for language models.
    merge_positions: language model -> source (producer module or `"text"`) -> int64 rows of the packed sequence.
    labels: `[tokens]` int64, the next text token or -100 where there is no loss.
    targets_in_batch: labels other than -100 in the whole global batch (all replicas and microbatches of the step).
    context_lengths: language model with cross-attention -> context tokens of each sample.
    """

    lengths: Mapping[str, tuple[int, ...]]
    inputs: Mapping[str, Tensor]
    merge_positions: Mapping[str, Mapping[str, Tensor]]
    labels: Mapping[str, Tensor]
    targets_in_batch: Mapping[str, int]
    context_lengths: Mapping[str, tuple[int, ...]]
