"""Bytes of a gradient on the wire when only its largest elements are sent, in few bits: exact, from the shape alone.

Reported for 5 % of the elements in 1 + 4 bits: 128 -> 6.2 MB. What indices cost decides it; see docs/compression.md.
"""

import math
from dataclasses import dataclass
from typing import Literal

from mmplan.scenario.technique import Compression

FP32_BYTES = 4
LEAST_ELEMENTS = 1024  # smaller tensors go in fp32, as PowerSGD sends vectors (arXiv 1905.13727, section 3)
SEGMENT = 65536  # elements within which two bytes are an index


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientFormat:
    """What is sent of a gradient's n elements: the ceil(fraction * n) largest, in blocks that share an fp32 scale.

    Attributes:
        values: "sign4": 1 bit of sign and 4 of magnitude. "fp8": e4m3.
        fraction: above 0; 1: all, without indices.
        block: values that share a scale, a power of two.
    """

    values: Literal["sign4", "fp8"]
    fraction: float
    block: int

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"a fraction of {self.fraction} elements; expected more than 0 and at most 1")

    def kept(self, elements: int) -> int:
        return math.ceil(self.fraction * elements)

    def dense(self, elements: int) -> bool:
        """Whether the tensor is too small for anything but fp32."""
        return elements < LEAST_ELEMENTS

    def value_bytes(self, kept: int) -> int:
        """Signs, magnitudes and scales."""
        numbers = math.ceil(kept / 8) + math.ceil(kept / 2) if self.values == "sign4" else kept
        return numbers + FP32_BYTES * math.ceil(kept / self.block)

    def wire_bytes(self, elements: int) -> int:
        """Of one rank's message about a tensor."""
        if self.dense(elements):
            return FP32_BYTES * elements
        kept = self.kept(elements)
        return index_bytes(elements, kept) + self.value_bytes(kept)


# X7: the article's 5 % and 1 + 4 bits. X8: its FP8 and 20 %. Blocks: those that the kernels take unasked.
TOP_K_SIGN = GradientFormat(values="sign4", fraction=0.05, block=256)
TOP_K_FP8 = GradientFormat(values="fp8", fraction=0.2, block=128)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredError:
    """What a format cost against no compression, in a training that is over: differences of means over five seeds in
    pairs, each with half its 95 % confidence interval."""

    loss: float
    loss_half_width: float
    top1_points: float
    top1_half_width: float


# benchmarks/compression.csv: captions of digits, 1,000 steps of AdamW on two processes.
MEASURED_ERRORS: dict[Compression, MeasuredError] = {
    "topk": MeasuredError(loss=0.4276, loss_half_width=0.1109, top1_points=-14.51, top1_half_width=4.62),
    "fp8": MeasuredError(loss=0.0475, loss_half_width=0.0162, top1_points=-1.59, top1_half_width=0.86),
}
FORMATS: dict[Compression, GradientFormat] = {"topk": TOP_K_SIGN, "fp8": TOP_K_FP8}

# Memory traffic of a message, counted pass by pass and not measured. Written, for each element: residual added (12),
# four passes and a last one of the radix select (20), residual made and kept (24), sum, mean and copy (36). Read, for
# each element and message: a bit of the index, and 12 for each element that was sent.
WRITTEN_BYTES = 92
READ_BYTES = 1 / 8
ADDED_BYTES = 12


def code_bytes(form: GradientFormat, elements: int, ranks: int) -> float:
    """Memory traffic to write a message about so many elements and to add those of all ranks."""
    return elements * (WRITTEN_BYTES + ranks * (READ_BYTES + ADDED_BYTES * form.fraction))


def as_bitmap(elements: int, kept: int) -> bool:
    """Whether a bit for each element is shorter than two bytes for each that is sent."""
    return bitmap_bytes(elements) <= offset_bytes(elements, kept)


def index_bytes(elements: int, kept: int) -> int:
    """Which elements are sent: nothing where all are, else the shorter of bitmap and offsets."""
    return 0 if kept == elements else min(bitmap_bytes(elements), offset_bytes(elements, kept))


def bitmap_bytes(elements: int) -> int:
    return math.ceil(elements / 8)


def offset_bytes(elements: int, kept: int) -> int:
    """Two bytes for the place within a segment, and the count of each segment in four."""
    return 2 * kept + 4 * math.ceil(elements / SEGMENT)
