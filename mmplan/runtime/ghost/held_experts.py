"""Parameters of a real model's experts that lie on other ranks than the rest of their blocks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import Parameter

from mmplan.runtime.ghost.split_experts import ExpertSplit, expert_cuts, parameters_away
from mmplan.runtime.held import Cut, Place, whole_place
from mmplan.runtime.tensor_sums import ExpertRanks


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldExperts:
    """By their names in the model: `here` are those that this rank has, of `cuts` its part; others are `away`."""

    ranks: ExpertRanks
    cuts: Mapping[str, Cut]
    here: frozenset[str]
    away: frozenset[str]

    @property
    def replicas(self) -> int:
        """Ranks that have the same experts."""
        return 1 if self.ranks.replicas is None else self.ranks.replicas.size()

    def own(self, name: str, value: Tensor) -> Tensor:
        """What this rank has of a whole parameter."""
        return self.cuts[name].own(value, self.ranks.index) if name in self.cuts else value

    def place(self, name: str, parameter: Parameter) -> Place:
        """Where it lies in the whole one. The first of the ranks that have the same writes it to checkpoints."""
        cut = self.cuts.get(name)
        place = whole_place(name, parameter) if cut is None else cut.place(name, parameter, self.ranks.index)
        return replace(place, writes=self.ranks.replicas is None or self.ranks.replicas.rank() == 0)


def held_experts(splits: Mapping[str, ExpertSplit], ranks: ExpertRanks) -> HeldExperts:
    """Args: splits: by unit."""
    cuts, away, every = dict[str, Cut](), set[str](), set[str]()
    for unit, split in splits.items():
        cuts |= {f"{unit}.{name}": cut for name, cut in expert_cuts(split, ranks.degree).items()}
        away |= {f"{unit}.{name}" for name in parameters_away(split, ranks.degree, ranks.index)}
        every |= {f"{unit}.{name}" for name in split.experts.parameters}
    return HeldExperts(ranks=ranks, cuts=cuts, here=frozenset(every - away), away=frozenset(away))
