"""How long a run may stand still before it is given up. Imports no torch."""

from dataclasses import dataclass

from mmplan.planner.plan import Plan
from mmplan.runtime.run_options import RunOptions

SHORTEST_TIMEOUT_S = 60.0
TIMEOUT_STEPS = 4.0  # a rank may rightly wait for a whole step, and NCCL counts from when the host posted a transfer
STEP_LIMIT_WAITS = 10.0  # a whole step may take as long as ten waits: it only ends what nobody waits for
# To import, meet and build stages, which takes minutes for billions of weights; less where the user set a time-out.
SETUP_TIMEOUT_S, SHORTEST_SETUP_TIMEOUT_S = 1800.0, 30.0


def time_scale(plan: Plan, unit_s: float) -> float:
    """Factor on all predicted computes that makes a mean forward, over microbatches and stages, last `unit_s`.

    Never below 1. A sleep ends up to a millisecond late whatever its length, so it is the mean that bounds the relative
    error of a step; a stage much shorter than the mean hardly matters to it.
    """
    return max(1.0, unit_s / (sum(stage.forward_s for stage in plan.stages) / len(plan.stages)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Seconds after which a run is given up: of a rank's wait for another in a step, of a whole step, of a wait while
    the run starts, and of the whole start."""

    wait_s: float
    step_s: float
    start_wait_s: float
    start_s: float


def limits(plan: Plan, options: RunOptions) -> Limits:
    """As the user set them, else by the prediction."""
    scale = time_scale(plan, options.unit_s) if options.rehearse else 1.0
    wait_s = options.timeout_s or default_timeout_s(plan, scale)
    step_s = options.step_timeout_s or STEP_LIMIT_WAITS * wait_s
    start_wait_s = SETUP_TIMEOUT_S if options.timeout_s is None else max(wait_s, SHORTEST_SETUP_TIMEOUT_S)
    return Limits(wait_s=wait_s, step_s=step_s, start_wait_s=start_wait_s, start_s=max(SETUP_TIMEOUT_S, step_s))


def default_timeout_s(plan: Plan, time_scale: float) -> float:
    """Of a communication in a step; `time_scale` is that of a rehearsal, else 1."""
    return max(SHORTEST_TIMEOUT_S, TIMEOUT_STEPS * time_scale * plan.certificate.objective_s)
