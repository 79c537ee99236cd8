"""One loss scale: it falls when gradients overflow and rises after a quiet period, always by powers of two.

The rule is that of torch.amp.GradScaler (and of arXiv 1710.03740, section 3.2). An article on multimodal training
raises the scale on overflow; that makes the next gradients larger still, and no step is ever taken again.
"""

import math
from dataclasses import dataclass, replace

# torch.amp.GradScaler's defaults
INIT_SCALE, GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleRule:
    """How scales move.

    Raises:
        ValueError: a factor is no power of two (unscaling would round), or moves a scale the wrong way.
    """

    growth_factor: float = GROWTH_FACTOR
    backoff_factor: float = BACKOFF_FACTOR
    growth_interval: int = GROWTH_INTERVAL

    def __post_init__(self) -> None:
        for name, factor in (("growth_factor", self.growth_factor), ("backoff_factor", self.backoff_factor)):
            require_power_of_two(name, factor)
        if self.growth_factor <= 1:
            raise ValueError(f"growth_factor {self.growth_factor} is not above 1: the scale would never rise")
        if self.backoff_factor >= 1:
            raise ValueError(f"backoff_factor {self.backoff_factor} is not below 1: an overflow would repeat for ever")
        if self.growth_interval < 1:
            raise ValueError(f"growth_interval {self.growth_interval} is not at least 1 step")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """`quiet_steps`: since the scale moved, with gradients and without overflow. Within 2^-126 and 2^126: fp32 holds
    these and their inverses."""

    scale: float
    quiet_steps: int = 0

    def __post_init__(self) -> None:
        require_power_of_two("a loss scale", self.scale)

    def after_overflow(self, rule: ScaleRule) -> "LossScale":
        return LossScale(scale=max(self.scale * rule.backoff_factor, 2.0**-126))

    def after_quiet(self, rule: ScaleRule) -> "LossScale":
        if self.quiet_steps + 1 < rule.growth_interval:
            return replace(self, quiet_steps=self.quiet_steps + 1)
        return LossScale(scale=min(self.scale * rule.growth_factor, 2.0**126))


def require_power_of_two(name: str, number: float) -> None:
    if not (math.isfinite(number) and number > 0 and math.frexp(number)[0] == 0.5):
        raise ValueError(f"{name} {number} is no power of two: unscaling by it would round gradients")
