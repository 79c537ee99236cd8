"""Runs that are made up from predictions."""

from dataclasses import replace

from mmplan.planner.prediction import Prediction, TimedAction
from mmplan.runtime.timeline import bare


def done_of(prediction: Prediction) -> tuple[TimedAction, ...]:
    """The timeline of a run that did exactly as predicted."""
    done = (item for item in prediction.timeline if item.action.kind not in ("SEND", "RECV"))
    return tuple(replace(item, action=bare(item.action)) for item in done)
