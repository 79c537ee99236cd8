"""What speaks against a reading of traces, in words: parts that are missing, clocks, files that are not of one job."""

import re
from collections import Counter

import numpy as np

from mmplan.cost_models.traces.attribution import Attribution
from mmplan.cost_models.traces.kernel_classes import CLASS_INDEX, MEMCPY, MEMSET
from mmplan.cost_models.traces.record import RankTrace
from mmplan.cost_models.traces.recording import CALL, OPERATOR, PYTHON, Recording
from mmplan.scenario.document import counted

_FEW_LAUNCHES = 0.5
_LAUNCH = re.compile(r"^(cuda|hip|cu)(Ext)?(Module)?LaunchKernel")


def doubts(recording: Recording, attribution: Attribution) -> list[str]:
    """Where a file is a part of what was recorded, its gaps are no idle time of the device."""
    work, host = recording.work, recording.host
    who, sentences = recording.file, list[str]()
    if not len(work):
        return sentences
    rows = work.correlation >= 0
    launched = float((attribution.launch >= 0).mean())
    if not (host.kind == CALL).any():
        sentences.append(f"{who}: no calls of the driver are recorded: idle time cannot be traced to the host")
    elif min(launched, _answered(recording)) < _FEW_LAUNCHES:
        sentences.append(
            f"{who}: {launched:.0%} of the kernels have their launch in the file, {_answered(recording):.0%} of the "
            "launches their kernel: it was filtered or cut, so gaps and shares may be those of what was left out"
        )
    processes = {
        recording.threads[i].partition("/")[0]
        for i in np.unique(host.thread[attribution.launch[attribution.launch >= 0]])
    }
    if recording.source == "kineto" and len(processes) > 1:
        sentences.append(
            f"{who}: {len(processes)} processes launch kernels in it: if it is a merged file, its ranks are mixed here"
        )
    back = attribution.launch >= 0
    if back.any() and rows.any():
        early = work.start_ns[back] < host.start_ns[attribution.launch[back]]
        if early.any():
            sentences.append(
                f"{who}: {counted(int(early.sum()), 'kernel')} of {int(back.sum()):,} begin before their launch: "
                "the clocks of host and device are apart, or queues began before the recording"
            )
    return sentences


def _answered(recording: Recording) -> float:
    """Of the launches of kernels, the part whose kernel is in the file."""
    host = recording.host
    launching = np.array([_LAUNCH.search(name[:100]) is not None for name in recording.names], bool)
    rows = (host.kind == CALL) & (host.correlation >= 0)
    rows &= launching[host.name] if len(launching) else False
    return float(np.isin(host.correlation[rows], recording.work.correlation).mean()) if rows.any() else 1.0


def missing(recording: Recording, trace: RankTrace) -> list[str]:
    """What the file does not hold, and which option of the profiler would give it."""
    work, host = recording.work, recording.host
    who, sentences = recording.file, list[str]()
    if not len(work) and not recording.on_cpu:
        how = (
            "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], without another profiler attached"
            if recording.source == "kineto"
            else "--trace=cuda,nvtx, and the kernels' tables exported"
        )
        return [f"{who}: no device work although the job ran on GPUs, so there are no costs: record with {how}"]
    if recording.source == "kineto":
        if not recording.calls and (host.kind == OPERATOR).any():
            sentences.append(
                f"{who}: no sizes of matrix products: record_shapes=True gives the FLOP/s that were reached"
            )
        if not trace.parts:
            named = "with_stack=True and with_modules=True" if not (host.kind == PYTHON).any() else "ranges around them"
            sentences.append(
                f"{who}: modules of the model are not visible: {named} would show vision, audio and text apart"
            )
    if any(message.bytes is None for message in trace.messages):
        of_torch = recording.source == "kineto"
        why = "PyTorch 2.2 or newer writes them into the kernels" if of_torch else "this profiler does not record them"
        sentences.append(f"{who}: some collectives without message sizes: {why}")
    copies = np.isin(work.kind, (CLASS_INDEX[MEMCPY], CLASS_INDEX[MEMSET]))
    if len(work) and (work.bytes[copies] < 0).any():
        sentences.append(f"{who}: copies whose bytes are not recorded count as 0 bytes")
    if len(work) and not trace.phases:
        sentences.append(
            f"{who}: forward and backward cannot be told apart: no kernel is joined to an operator of autograd"
        )
    return sentences


def set_doubts_of(recordings: tuple[Recording, ...]) -> list[str]:
    """What speaks against these files being the ranks of one job."""
    sentences = []
    ranks = Counter(recording.rank for recording in recordings if recording.rank is not None)
    for rank, count in ranks.items():
        if count > 1:
            sentences.append(
                f"{count} files say that they are rank {rank}: profiles of several moments, or of several jobs"
            )
    worlds = sorted({recording.world_size for recording in recordings if recording.world_size is not None})
    if len(worlds) > 1:
        sentences.append(f"the files are of jobs with {', '.join(map(str, worlds))} ranks: of one job they cannot be")
    world = worlds[0] if len(worlds) == 1 else None
    if world is not None and len(recordings) > 1 and len(ranks) < world:
        sentences.append(f"{len(ranks)} of {world} ranks are here: a straggler may be among the others")
    return sentences
