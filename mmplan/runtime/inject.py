"""Faults on purpose, to rehearse what a run does then: `kill rank=1 step=3 action=B2`. Imports no torch.

A fault strikes where the rank's position says that it is (`position.py`), once in a run, not again after a resume.
"""

import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from mmplan.cost_models.build import build_graph
from mmplan.errors import InputError
from mmplan.planner.plan import Plan
from mmplan.planner.plan_schedule import plan_schedule
from mmplan.planner.stage_graph import build_stage_graph
from mmplan.runtime.places import idle_ranks, place_of

Kind = Literal["kill", "raise", "stall", "stop", "nan"]

_FOREVER_S = 1e9
_PLACES = ("start", "data", "save", "end")  # besides actions
_ACTION = re.compile(r"(\d*)(F|B|I|W|TIE)(\d+)|(\d*)(REDUCE|STEP)")
_WORDS = "KIND rank=N [step=N] [action=F2] [signal=KILL] with KIND one of " + ", ".join(get_args(Kind))


class InjectedError(Exception):
    """What an injected `raise` raises."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Injection:
    """One fault.

    Attributes:
        kind: kill sends `signal` to the own process; raise raises; stall sleeps; stop halts the process by SIGSTOP; nan
            makes what the action computes no number.
        step: None: any.
        action: `B2` on any stage, `1B2` on stage 1, `REDUCE`, `TIE0`, `STEP`, or `start`, `data`, `save`, `end`;
            empty: the first action of the step.
    """

    kind: Kind
    rank: int
    step: int | None = None
    action: str = ""
    signal: str = "SIGKILL"

    def at(self, step: int, place: str) -> bool:
        if self.step is not None and self.step != step:
            return False
        if self.action in _PLACES:
            return place.startswith(self.action)
        found = re.fullmatch(r"(\d+)((?:F|B|I|W|TIE)\d+|REDUCE|STEP)", place)
        return found is not None and self.action in ("", found[2], place)

    def strikes(self, step: int, place: str) -> bool:
        return self.kind != "nan" and self.at(step, place)


def parse_injection(text: str) -> Injection:
    """The fault that a user wrote.

    Raises:
        InputError: an unknown word.
    """

    def wrong(said: str) -> InputError:
        return InputError(f"--inject {text[:80]!r}: {said}; expected {_WORDS}")

    kind, *settings = text.split() or [""]
    if kind not in get_args(Kind):
        raise wrong(f"{kind!r} is no fault")
    found = dict.fromkeys(("rank", "step", "action", "signal"), "")
    for setting in settings:
        key, sign, value = setting.partition("=")
        if key not in found or not sign or not value or found[key]:
            raise wrong(f"{setting!r} is not understood")
        found[key] = value
    for key in ("rank", "step"):
        if found[key] and not re.fullmatch(r"\d{1,9}", found[key]):
            raise wrong(f"{key} is a number")
    if not found["rank"]:
        raise wrong("no rank")
    if found["action"] and found["action"] not in _PLACES and not _ACTION.fullmatch(found["action"]):
        raise wrong(f"{found['action']!r} is no action: F2, 1B2, REDUCE, STEP or {', '.join(_PLACES)}")
    name = "SIG" + (found["signal"] or "KILL").upper().removeprefix("SIG")
    if name not in signal.Signals.__members__ or (found["signal"] and kind != "kill"):
        raise wrong(f"signal={found['signal']} needs a kill and a signal's name")
    if kind == "nan" and found["action"] in _PLACES:
        raise wrong("only actions compute something")
    return Injection(
        kind=kind,  # type: ignore[arg-type]
        rank=int(found["rank"]),
        step=int(found["step"]) if found["step"] else None,
        action=found["action"],
        signal=name,
    )


def strike(fault: Injection) -> None:
    """Let it happen here."""
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.Signals[fault.signal])
            time.sleep(_FOREVER_S)  # a signal that is caught or ignored: as good as a stall
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "stall":
            time.sleep(_FOREVER_S)
        case "raise":
            raise InjectedError("injected by --inject")
        case "nan":
            raise ValueError("nan does not strike, it is asked for by `Position.poisoned`")


def check_injections(injections: Sequence[Injection], plan: Plan, steps: int, ranks: int) -> None:
    """Refuse a fault that can never strike.

    Args:
        plan: with one process for each rank, as it is started.

    Raises:
        InputError: the plan has no such rank, stage or microbatch, the rank no such action, or the run no such step.
    """
    for one in injections:
        if one.rank >= ranks:
            raise InputError(f"--inject: rank {one.rank}, and the run has ranks 0 to {ranks - 1}")
        if one.step is not None and one.step >= steps:
            raise InputError(f"--inject: step {one.step}, and the run has steps 0 to {steps - 1}")
        found = _ACTION.fullmatch(one.action)
        if found is None or found[2] == "TIE":  # what stages of a job share is known when it runs
            continue
        stage, microbatch = found[1] or found[4], found[3]
        if stage and int(stage) >= len(plan.stages):
            raise InputError(f"--inject: stage {stage}, and the plan has stages 0 to {len(plan.stages) - 1}")
        if microbatch and int(microbatch) >= plan.microbatches:
            raise InputError(f"--inject: {one.action}, and the plan has microbatches 0 to {plan.microbatches - 1}")
        if one.rank in idle_ranks(plan):
            raise InputError(f"--inject: {one.action}, and rank {one.rank} of the plan has no stage")
        if microbatch:
            stages = build_stage_graph([part.layers for part in plan.stages], build_graph(plan.scenario))
            own = plan_schedule(plan, stages)[place_of(plan, one.rank).row]
            names = {f"{stage}{compute.kind}{compute.microbatch}" for compute in own for stage in ("", compute.stage)}
            if one.action not in names:
                kinds = " and ".join(sorted({f"{compute.stage}{compute.kind}" for compute in own}))
                raise InputError(f"--inject: {one.action}, and rank {one.rank} has {kinds} of each microbatch")
