"""Does a calibration by one run predict it better, and others too? The same steps predicted before and after."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mmplan.errors import InputError
from mmplan.planner.new_prices import on_profile
from mmplan.planner.plan import Plan, load_plan
from mmplan.runtime.measurement import Measurement, load_run, plan_hash
from mmplan.runtime.recorded_steps import predict
from mmplan.runtime.run_check import require_consistent
from mmplan.scenario.profile import Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Repriced:
    """The recorded step of a run; `held_out`: the calibration has not seen it."""

    name: str
    held_out: bool
    measured_s: float
    before_s: float
    after_s: float

    @property
    def error_before(self) -> float:
        """Predicted over measured, less one."""
        return self.before_s / self.measured_s - 1

    @property
    def error_after(self) -> float:
        return self.after_s / self.measured_s - 1


def reprice(plan: Plan, run: Measurement, profile: Profile, path: Path, *, name: str, held_out: bool) -> Repriced:
    """Args: path: the profile's file, for messages.

    Raises:
        InputError: the profile is not of a device of the plan, or the run is of another plan or a rehearsal.
    """
    if run.plan_hash != plan_hash(plan):
        raise InputError(f"run {name} is of plan {run.plan_hash}, the plan given with it is {plan_hash(plan)}")
    if run.rehearsed:
        raise InputError(f"run {name} is a rehearsal, which sleeps, so it says nothing about prices")
    after = replace(plan, scenario=on_profile(plan.scenario, profile, path))
    return Repriced(
        name=name,
        held_out=held_out,
        measured_s=run.step_time_s,
        before_s=predict(plan, run.recorded_step).step_time_s,
        after_s=predict(after, run.recorded_step).step_time_s,
    )


def reprice_files(
    seen: tuple[Plan, Measurement, Path], others: Sequence[tuple[Path, Path]], profile: Profile, path: Path
) -> tuple[Repriced, ...]:
    """The run that calibrated first, then (plan file, run file) of others.

    Raises:
        InputError: see `reprice`; or a file is none.
    """
    plan, run, run_file = seen
    rows = [reprice(plan, run, profile, path, name=run_file.name, held_out=False)]
    for plan_file, other_file in others:
        other = load_run(other_file)
        require_consistent(other, other_file)
        rows.append(reprice(load_plan(plan_file), other, profile, path, name=other_file.name, held_out=True))
    return tuple(rows)
