"""The load of a microbatch that is larger than almost all others: what memory has to be planned for."""

from mmplan.cost_models.load import Load
from mmplan.cost_models.loads import sample_loads
from mmplan.scenario.samples import reference_samples
from mmplan.scenario.scenario import Scenario

QUANTILE = 0.99


def peak_loads(scenario: Scenario, microbatch_size: int, quantile: float = QUANTILE) -> dict[str, Load]:
    """Module name -> load of the microbatch at that quantile of the module's tokens, over consecutive microbatches
    of the reference samples; with one fixed sample this is the mean."""
    samples = reference_samples(scenario.data)
    if len(samples) == 1:
        return {name: load.scaled(microbatch_size) for name, load in sample_loads(scenario, samples).items()}
    each = [sample_loads(scenario, (sample,)) for sample in samples]
    result: dict[str, Load] = {}
    for module in scenario.model.modules:
        name = module.name
        sums = [
            sum((loads[name] for loads in each[first : first + microbatch_size]), Load())
            for first in range(0, max(1, len(each) - microbatch_size + 1), microbatch_size)
        ]
        ordered = sorted(sums, key=lambda load: (load.tokens, load.pairs))
        result[name] = ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]
    return result
