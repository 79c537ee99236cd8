"""Axes of the search that have to be asked for: their proofs may take long or stay open, or they change numbers."""

from dataclasses import dataclass

from mmplan.cost_models.degrees import tp_degrees
from mmplan.scenario.scenario import Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class UnsearchedAxis:
    """An axis that a search left out. `axis`: its key in `constraints`; `constraint` searches it there."""

    axis: str
    says: str
    constraint: str


def not_searched(scenario: Scenario) -> tuple[UnsearchedAxis, ...]:
    """Those that a scenario could have and does not ask for."""
    rules, technique = scenario.constraints, scenario.technique
    others = [module for module in scenario.model.modules if module.kind != "language_model"]
    encoders, frozen = bool(others), any(module.training.mode == "frozen" for module in others)
    fp8 = all(pool.device.fp8_flops_per_s is not None for pool in scenario.cluster.pools) and technique.fp8 == "none"
    splits = rules.sequence_parallel or technique.sequence_parallel or max(tp_degrees(scenario)) == 1
    compresses = rules.compression != ("none",) or technique.compression != "none"
    found = (
        ("modules", "encoders on ranks of their own", "modules: any", encoders and rules.modules == ()),
        (
            "encode_together",
            "encoders for several microbatches at once",
            "encode_together: any",
            encoders and rules.encode_together == (),
        ),
        ("prefetch", "frozen encoders a step ahead", "prefetch: any", frozen and rules.prefetch == ()),
        ("spread", "rows of images over ranks", "spread: {vision: patches}", encoders and rules.patches == ()),
        (
            "sequence_parallel",
            "rows of language models over tp",
            "sequence_parallel: any",
            not splits and rules.tp != (1,),
        ),
        (
            "offload",
            "host memory",
            "offload: [none, optimizer]",
            rules.offload == ("none",) and technique.offload == "none",
        ),
        ("fp8", "products in FP8", "fp8: [none, block]", fp8 and rules.fp8 == ("none",)),
        ("compression", "smaller gradients", "compression: [none, topk]", not compresses),
    )
    return tuple(UnsearchedAxis(axis=axis, says=says, constraint=how) for axis, says, how, missing in found if missing)
