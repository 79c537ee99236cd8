"""Sizes of collectives whose kernels say nothing of them, from the annotation (`nccl:all_reduce`) around their
launch.
"""

from dataclasses import replace

import numpy as np

from mmplan.cost_models.traces.attribution import Attribution
from mmplan.cost_models.traces.kernel_classes import UNNAMED
from mmplan.cost_models.traces.recording import Indexed, Message, Recording

_MOST_LEVELS = 20


def with_messages(recording: Recording, attribution: Attribution) -> Recording:
    """The recording with the size, group and true name (NCCL runs all-to-alls as SendRecv) where the host knows
    them.
    """
    work, host = recording.work, recording.host
    if not (host.message >= 0).any():
        return recording
    messages = Indexed[Message]()
    for message in recording.messages:
        messages.of(message)
    column = work.message.copy()
    for row in np.flatnonzero(work.message >= 0).tolist():
        own = recording.messages[int(work.message[row])]
        if own.bytes is not None and own.ranks is not None:
            continue
        above, levels = int(attribution.launch[row]), 0
        while above >= 0 and levels < _MOST_LEVELS and host.message[above] < 0:
            above, levels = int(attribution.parent[above]), levels + 1
        if above >= 0 and host.message[above] >= 0:
            column[row] = messages.of(_merged(own, recording.messages[int(host.message[above])]))
    return replace(recording, work=replace(work, message=column), messages=tuple(messages.values))


def _merged(kernel: Message, annotation: Message) -> Message:
    named = kernel.collective if annotation.collective in (UNNAMED, "send_recv") else annotation.collective
    return Message(
        collective=named,
        bytes=annotation.bytes if kernel.bytes is None else kernel.bytes,
        ranks=kernel.ranks or annotation.ranks,
        group=kernel.group or annotation.group,
        members=kernel.members or annotation.members,
    )
