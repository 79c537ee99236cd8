"""How many tokens a sample, and a microbatch, brings to each module."""

from dataclasses import dataclass

import numpy as np

from mmplan.cost_models.loads import sample_loads
from mmplan.planner.presence import disagreement, optional_modalities
from mmplan.scenario.samples import reference_samples
from mmplan.scenario.scenario import Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCounts:
    """Tokens of one module: of single samples, and of microbatches of samples in a row. `lacking`: fraction of
    microbatches with none at all; `differing`: fraction of microbatches that some replicas have and others lack."""

    module: str
    modality: str
    mean: float
    p50: float
    p95: float
    p99: float
    most: float
    microbatch_mean: float
    microbatch_p95: float
    microbatch_most: float
    lacking: float
    differing: float


def token_counts(scenario: Scenario, *, microbatch_size: int, replicas: int) -> tuple[TokenCounts, ...]:
    """One entry for each module with tokens, over the reference samples of the data."""
    samples = reference_samples(scenario.data)
    loads = [sample_loads(scenario, [sample]) for sample in samples]
    optional = optional_modalities(scenario, microbatch_size)
    result = []
    for module in scenario.model.modules:
        tokens = np.array([load[module.name].tokens for load in loads])
        if not tokens.any():
            continue
        repeated = np.resize(tokens, max(1, len(tokens) // microbatch_size) * microbatch_size)
        groups = repeated.reshape(-1, microbatch_size).sum(axis=1)
        p50, p95, p99 = (float(np.quantile(tokens, q)) for q in (0.5, 0.95, 0.99))
        lacking = optional.get(module.modality, 0.0) if (tokens == 0).any() else 0.0
        result.append(
            TokenCounts(
                module=module.name,
                modality=module.modality,
                mean=float(tokens.mean()),
                p50=p50,
                p95=p95,
                p99=p99,
                most=float(tokens.max()),
                microbatch_mean=float(groups.mean()),
                microbatch_p95=float(np.quantile(groups, 0.95)),
                microbatch_most=float(groups.max()),
                lacking=lacking,
                differing=disagreement(lacking, replicas, 1),
            )
        )
    return tuple(result)
