"""Convolutional encoders of raw sound, as codecs have them: DAC (arXiv 2306.06546). Rows of samples become rows of
frames inside the first layer of the module that reads them."""

from math import prod

from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.steps import Active, Convolve, Dense, Kept, Steps, residual


def snake(width: int) -> Steps:
    """A periodic activation with a learned period for each channel."""
    return (Kept(size=width), Active(function="sigmoid"))


def dac_encoder(fields: Fields) -> tuple[Steps, int, int]:
    """Steps from samples to rows of `codebook_dim`-independent width, that width, and samples of a row."""
    width, strides = fields.count("encoder_hidden_size"), fields.numbers("downsampling_ratios", most=10_000)
    steps: Steps = (Convolve(width=width, taps=7),)
    for stride in strides:
        unit = residual(*snake(width), Convolve(width=width, taps=7), *snake(width), Dense(width=width))
        steps += (unit, unit, unit, *snake(width))
        width *= 2
        steps += (Convolve(width=width, taps=2 * stride, joins=stride),)
    return (*steps, *snake(width), Convolve(width=width, taps=3)), width, prod(strides)
