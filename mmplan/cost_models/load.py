"""How much work a microbatch brings to each module: tokens and attention pairs.

FLOPs and bytes of a layer are linear in a `Load`, so the load of a microbatch is the sum of its samples' loads, and the
mean load of the data has the mean FLOPs and bytes exactly. Seconds are linear too, but for the floor of a launch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from operator import add, attrgetter


@dataclass(frozen=True, slots=True)
class Load:
    """One module's share of one microbatch.

    sequences: images, clips or samples; tokens: all tokens; pairs: sum over sequences of length squared (query-key
    pairs of full attention); window_pairs: the same within attention windows; context_tokens and context_pairs: tokens
    that cross-attention reads and sum of query length times context length; input_elements: raw input values (pixels,
    mel frames, token ids) the module's first layer reads; targets: tokens with a loss; outputs: tokens that the module
    hands on (after pooling and without dropped class tokens); chunk_tokens: all tokens with each sequence filled up to
    whole chunks of linear attention.

    A projector's context_tokens are the tokens it reads, a talker's those that its `hidden` edge brings.
    """

    sequences: float = 0.0
    tokens: float = 0.0
    pairs: float = 0.0
    window_pairs: float = 0.0
    context_tokens: float = 0.0
    context_pairs: float = 0.0
    input_elements: float = 0.0
    targets: float = 0.0
    outputs: float = 0.0
    chunk_tokens: float = 0.0

    def __add__(self, other: "Load") -> "Load":
        return Load(*map(add, _values(self), _values(other)))

    def scaled(self, factor: float) -> "Load":
        """Every field times `factor`."""
        return Load(*(value * factor for value in _values(self)))


_values = attrgetter(*(field.name for field in fields(Load)))


Loads = Mapping[str, Load]  # module name -> its load in one microbatch
