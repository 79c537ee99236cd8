"""Live seconds per modality (`mmplan replan --profile`) of the modules or ranges that a trace shows."""

from collections.abc import Sequence
from pathlib import Path

from mmplan.cost_models.formats.trace_reading import analysed, recordings_of
from mmplan.cost_models.traces.modules_of import AUDIO, PROJECTOR, TEXT, VISION
from mmplan.cost_models.traces.record import PartTime
from mmplan.cost_models.traces.steps import steps_of
from mmplan.cost_models.traces.summary import rank_trace
from mmplan.errors import InputError
from mmplan.scenario.document import counted
from mmplan.scenario.formats.reading import Reading
from mmplan.scenario.modality_profile import SCHEMA
from mmplan.units import format_seconds

_MODALITIES = (VISION, AUDIO, TEXT)


def read_trace_modalities(paths: Sequence[Path]) -> Reading:
    """Forward seconds of each modality for one call: of one microbatch, where each microbatch is one call.

    Raises:
        InputError: no trace, or no part of a model is visible in it.
    """
    ranks = []
    for recording in recordings_of(paths):
        item = analysed(recording)
        trace, _ = rank_trace(item.recording, item.attribution, steps_of(item.recording, item.attribution.launch))
        ranks.append((recording.label, {part.name: part for part in trace.parts if part.calls and part.forward_s > 0}))
    if not any(parts for _, parts in ranks):
        message = (
            "no forward of a vision, audio or text module is visible in it: profile with with_stack=True and "
            "with_modules=True, or set ranges around them (NVTX, torch.profiler.record_function) that are called so"
        )
        raise InputError(message, file=paths[0])
    read, ignored, warnings = list[str](), list[str](), list[str]()
    forward: dict[str, float] = {}
    for name in (*_MODALITIES, PROJECTOR):
        own = [(label, parts[name]) for label, parts in ranks if name in parts]
        if not own:
            continue
        times = [_per_call(part) for _, part in own]
        forward[name] = sum(times) / len(times)
        calls = ", ".join(f"{label}: {counted(part.calls, 'call')}" for label, part in own[:4])
        read.append(f"{name}: forward {format_seconds(forward[name])} a call ({calls})")
        if len(own) > 1:
            warnings.append(
                f"{name} is on {len(own)} of {len(ranks)} ranks, whose mean is taken, as of replicas or tensor-"
                "parallel ranks: stages of a pipeline would have to be added"
            )
    _place_projector(forward, read, ignored)
    ignored.append("weights of the modalities: a trace does not show them")
    entries = {name: {"forward": f"{forward[name]:.6g} s"} for name in _MODALITIES if name in forward}
    return Reading(
        kind="trace-modalities",
        fragment={"schema": SCHEMA, "source": ", ".join(path.name for path in paths)[:200], "modalities": entries},
        document="live profile for `mmplan replan --profile`",
        read=tuple(read),
        ignored=tuple(ignored),
        warnings=tuple(warnings),
    )


def _per_call(part: PartTime) -> float:
    return part.forward_s / part.calls


def _place_projector(forward: dict[str, float], read: list[str], ignored: list[str]) -> None:
    """A projector belongs to the modality of its encoder, which is known where there is one encoder."""
    seconds = forward.pop(PROJECTOR, None)
    if seconds is None:
        return
    encoders = [name for name in (VISION, AUDIO) if name in forward]
    if len(encoders) == 1:
        forward[encoders[0]] += seconds
        read.append(f"the projector's {format_seconds(seconds)} count to {encoders[0]}")
    else:
        ignored.append(f"projector: {format_seconds(seconds)} a call; whose it is cannot be told")
