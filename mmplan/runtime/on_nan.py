"""What becomes of a step whose loss or gradients are no numbers. Imports nothing, so that the command line may."""

from typing import Literal

OnNan = Literal["stop", "skip"]
DEFAULT_MAX_SKIPS = 10  # in a row: by then it is the training that is broken, not a batch
