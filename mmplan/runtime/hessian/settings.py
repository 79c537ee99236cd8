"""What is to be measured and how, as every process of a measurement gets it. Imports no torch."""

from dataclasses import dataclass, field
from pathlib import Path

ITERATIONS = 50  # at most; blocks of models that were trained need about 10, of random ones up to 40
TOLERANCE = 1e-2  # bounds the error by 1 %; being of the order of the residual squared it is far smaller


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """
    Attributes:
        samples: of one batch.
        batches: of each seed; a layer has `seeds * batches` values, from which its interval comes.
        seeds: repetitions with other batches and other start vectors; their ranks are compared.
        microbatch: samples of one forward; None: as many as have the same modalities, one of a job's.
        iterations: Lanczos steps of one value, at most.
        tolerance: residual at which a value is converged, as a fraction of it.
        trace: vectors for Hutchinson's estimate of the trace; 0: none.
        gauss_newton: the Gauss-Newton matrix instead of the Hessian.
        skip_frozen: layers without trained parameters are left out, and frozen parameters of the others.
        recompute: graphs are made again for each product: more time, less memory.
        layers: ids, modules and ranges to measure; empty: all.
        rule: what makes zones, see `scenario/zone_rules.py`.
    """

    samples: int = 8
    batches: int = 3
    seeds: int = 2
    microbatch: int | None = None
    iterations: int = ITERATIONS
    tolerance: float = TOLERANCE
    trace: int = 0
    gauss_newton: bool = False
    skip_frozen: bool = False
    recompute: bool = False
    layers: tuple[str, ...] = field(default=())
    rule: str = "percentile:85"


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Files: the scenario; the job, None: the scenario's own model; weights of either; other data; where the result
    goes. `restart`: what is unfinished there does not count. `device`: cpu or cuda; None: CUDA where there is one."""

    scenario: Path
    job: Path | None = None
    weights: Path | None = None
    data: Path | None = None
    output: Path
    restart: bool = False
    device: str | None = None
    settings: Settings = field(default_factory=Settings)

    @property
    def partial(self) -> Path:
        """Where an unfinished measurement lies."""
        return self.output.with_suffix(".partial.json")
