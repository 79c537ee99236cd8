"""The load of a microbatch that is larger than almost all others: what memory has to be planned for."""

from collections.abc import Sequence
from functools import lru_cache

from mmplan.cost_models.load import Load
from mmplan.cost_models.loads import each_load
from mmplan.scenario.samples import reference_samples
from mmplan.scenario.scenario import Data, Model, Scenario

QUANTILE = 0.99


class MicrobatchLoads:
    """Mean and peak loads of a job's microbatches; the reference samples are measured once for all sizes."""

    def __init__(self, model: Model, data: Data) -> None:
        self._each = each_load(model, reference_samples(data))
        self._peaks: dict[int, dict[str, Load]] = {}
        self._names = [module.name for module in model.modules]

    def mean(self, microbatch_size: int) -> dict[str, Load]:
        """Module name -> mean load of a microbatch."""
        count = len(self._each)
        return {name: _sum(self._each, name).scaled(microbatch_size / count) for name in self._names}

    def peak(self, microbatch_size: int, quantile: float = QUANTILE) -> dict[str, Load]:
        """Module name -> load of the microbatch at that quantile of the module's tokens, over consecutive microbatches
        of the reference samples; with one fixed sample this is the mean."""
        if len(self._each) == 1:
            return {name: load.scaled(microbatch_size) for name, load in self._each[0].items()}
        if microbatch_size not in self._peaks:
            self._peaks[microbatch_size] = {name: self._at(name, microbatch_size, quantile) for name in self._names}
        return self._peaks[microbatch_size]

    def _at(self, name: str, size: int, quantile: float) -> Load:
        starts = range(0, max(1, len(self._each) - size + 1), size)
        ordered = sorted((_sum(self._each[first : first + size], name) for first in starts), key=_order)
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]


def peak_loads(scenario: Scenario, microbatch_size: int) -> dict[str, Load]:
    """Module name -> load of a microbatch at the 99th percentile, see `MicrobatchLoads.peak`."""
    return _remembered(scenario.model, scenario.data).peak(microbatch_size)


@lru_cache(maxsize=8)
def _remembered(model: Model, data: Data) -> MicrobatchLoads:
    return MicrobatchLoads(model, data)


def _sum(samples: Sequence[dict[str, Load]], name: str) -> Load:
    return sum((loads[name] for loads in samples), Load())


def _order(load: Load) -> tuple[float, float]:
    return load.tokens, load.pairs
