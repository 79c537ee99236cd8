"""The interpreter of a lowered program: one rank runs its list of actions against the stages it holds.

It knows nothing of models. SEND and RECV are asynchronous and posted where the program says; a compute waits for the
tensors received for it. On CUDA they and the sums over replicas run beside compute (`streams.py`). Sizes are the
program's, and a stage that hands over another number of bytes ends the run.
"""

import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mmplan.errors import RunError
from mmplan.planner.program import Action, RankProgram, is_ahead, named_by_layers
from mmplan.runtime.ahead import Features
from mmplan.runtime.clock import Clock, Mark
from mmplan.runtime.failure import described
from mmplan.runtime.network import Message, post_receive, post_send
from mmplan.runtime.position import Position
from mmplan.runtime.ranges import action_range
from mmplan.runtime.stage import Stage
from mmplan.runtime.streams import Streams, streams_of
from mmplan.runtime.update_check import UpdateCheck

T = TypeVar("T")
_TAGS = 2**31  # gloo takes any non-negative 32-bit tag, NCCL ignores tags and matches by the program's order


@dataclass(slots=True)
class StepRecord:
    """What one rank did in one step; marks (an action's inputs asked for, begun, ended) become seconds once the step is
    over (see `Clock`)."""

    marks: list[tuple[Action, Mark, Mark, Mark]] = field(default_factory=list)
    wait_s: float = 0.0  # host time in which a compute waited for tensors
    activation_bytes: int = 0  # sent
    gradient_bytes: int = 0  # sent
    reduce_bytes: int = 0  # handed to collectives among replicas
    peak_memory_bytes: int = 0


def run_step(
    program: RankProgram,
    stages: Mapping[int, Stage],
    *,
    device: torch.device,
    clock: Clock,
    network: dist.ProcessGroup | None = None,
    modalities: Mapping[int, str] | None = None,
    position: Position | None = None,
    check: UpdateCheck | None = None,
    features: Features | None = None,
) -> StepRecord:
    """Run one optimizer step.

    Args:
        stages: the stages of this rank by index.
        network: the group of all ranks over which tensors are sent; None: torch's default group.
        modalities: of each stage, for the names that profilers show.
        position: is kept up to date, for whoever asks what this rank does.
        check: looks at losses and gradients before the update.
        features: what waits for this step, and then what waits for the next one.

    Raises:
        RunError: an action failed; names rank, action and cause.
    """
    record = StepRecord()
    position = position or Position(program.rank)
    streams, named = streams_of(device), partial(action_range, modalities=modalities or {}, device=device)
    mailbox = _Mailbox(device, network, position, streams, Features() if features is None else features)
    outputs: dict[tuple[str, int], Tensor] = {}
    to_send = Counter(map(_made, (action for action in program.actions if action.kind == "SEND")))
    for action in program.actions:
        moved_bytes = _moved_bytes(stages)
        try:
            position.enter(action, _peer(action))
            if action.kind in ("F", "B", "I", "W"):
                stage = stages[action.stage]
                started, asked = time.perf_counter(), clock.mark()
                received = _inputs(action, stage, mailbox, outputs)
                record.wait_s += time.perf_counter() - started
                results = _timed(action, asked, clock, record, named, partial(_compute, action, stage, received))
                _count_moved(action, moved_bytes, stages, record)
                if device.type == "cpu":  # elsewhere the allocator counts
                    in_use = sum(stage.memory_bytes() for stage in stages.values()) + mailbox.features_bytes()
                    record.peak_memory_bytes = max(record.peak_memory_bytes, in_use)
                made = {name: result for name, result in results.items() if name not in program.unsent}
                outputs.update({(tensor, action.microbatch): result for tensor, result in made.items()})
                if position.poisoned():
                    stage.poison()
            elif action.kind == "RECV":
                with named(action):
                    mailbox.receive(action)
            elif action.kind == "SEND":
                key = _made(action)
                to_send[key] -= 1
                tensor = outputs.pop(key, None) if to_send[key] == 0 else outputs.get(key)
                with named(action):
                    _send(action, tensor, mailbox, record)
            else:
                if position.poisoned():
                    stages[action.stage].poison()
                with _behind_computes(action, streams):
                    if action.kind == "STEP" and check is not None:
                        check.run(stages, position)
                    _timed(action, None, clock, record, named, partial(_finish, action, stages))
                _count_moved(action, moved_bytes, stages, record)
        except RunError:
            raise
        except Exception as error:
            raise RunError(f"rank {program.rank}, action {action}: {described(error)}") from error
    position.enter("drain")
    mailbox.drain()
    _refuse_unsent(program.rank, outputs)
    return record


def _timed(
    action: Action,
    asked: Mark | None,
    clock: Clock,
    record: StepRecord,
    named: Callable[[Action], AbstractContextManager[None]],
    work: Callable[[], T],
) -> T:
    """What an action's work gives; `asked`: when its inputs were asked for, None where it has none."""
    start = clock.mark()
    with named(action):
        result = work()
    record.marks.append((action, start if asked is None else asked, start, clock.mark()))
    return result


def _inputs(
    action: Action, stage: Stage, mailbox: "_Mailbox", outputs: dict[tuple[str, int], Tensor]
) -> dict[str, Tensor]:
    """What was received for a compute, and what other stages of this rank have made for it."""
    if action.kind == "W":
        return {}
    gradients = action.kind != "F"
    received = mailbox.take(action.stage, action.microbatch, gradients=gradients)
    for tensor in stage.reads(gradients=gradients):
        if (tensor, action.microbatch) in outputs:
            made = outputs.pop((tensor, action.microbatch))
            if made.nbytes:
                received[tensor] = made.detach().contiguous().view(-1).view(torch.uint8)
    return received


def _compute(action: Action, stage: Stage, received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """What other stages read of the result."""
    match action.kind:
        case "F":
            return stage.forward(action.microbatch, received)
        case "B":
            return stage.backward(action.microbatch, received)
        case "I":
            return stage.backward_input(action.microbatch, received)
        case _:
            stage.backward_weight(action.microbatch)
            return {}


def _send(action: Action, tensor: Tensor | None, mailbox: "_Mailbox", record: StepRecord) -> None:
    """All of a tensor, or a part."""
    if tensor is None:
        raise RunError(f"action {action} sends {action.tensor}, which its stage has not computed")
    planned_bytes = action.whole_bytes or action.bytes
    if planned_bytes != tensor.nbytes:
        raise RunError(f"action {action}: the stage made {tensor.nbytes} bytes, the program says {planned_bytes}")
    mailbox.send(action, tensor)
    if "<" in action.tensor:
        record.gradient_bytes += action.bytes
    else:
        record.activation_bytes += action.bytes


def _behind_computes(action: Action, streams: Streams) -> AbstractContextManager[None]:
    """Sums run beside computes that follow; the update behind all sums."""
    if action.kind != "STEP":
        return streams.summing()
    streams.summed()
    return nullcontext()


def _finish(action: Action, stages: Mapping[int, Stage]) -> None:
    """REDUCE of one stage, TIE of what it holds with others, or STEP of all that the rank holds."""
    if action.kind == "REDUCE":
        stages[action.stage].reduce()
    elif action.kind == "TIE":
        stages[action.stage].tie(action.microbatch)
    else:
        for stage in stages.values():
            stage.step()


def _moved_bytes(stages: Mapping[int, Stage]) -> int:
    return sum(stage.moved_bytes() for stage in stages.values())


def _count_moved(action: Action, before: int, stages: Mapping[int, Stage], record: StepRecord) -> None:
    moved_bytes = _moved_bytes(stages) - before
    if moved_bytes != action.bytes:
        raise RunError(
            f"action {action}: the stage gave {moved_bytes} bytes to collectives among its replicas, the program says "
            f"{action.bytes}"
        )
    record.reduce_bytes += moved_bytes


def _refuse_unsent(rank: int, outputs: Mapping[tuple[str, int], Tensor]) -> None:
    unsent = [f"{tensor} of microbatch {index}" for (tensor, index), value in outputs.items() if value.nbytes > 0]
    if unsent:
        raise RunError(f"rank {rank} computed {unsent[0]} and the program never sends it ({len(unsent)} such tensors)")


class _Mailbox:
    """Tensors of one rank that are under way in one step."""

    def __init__(
        self,
        device: torch.device,
        network: dist.ProcessGroup | None,
        position: Position,
        streams: Streams,
        features: Features,
    ) -> None:
        self._device, self._network, self._position, self._streams = device, network, position, streams
        self._features, waiting = features, features.received
        self._receives: dict[tuple[int, int, bool], list[tuple[Action, Message]]] = {
            (*key, False): messages for key, messages in waiting.items()
        }
        features.received = {}
        self._sends: dict[tuple[str, int], list[tuple[Action, Message]]] = {}

    def receive(self, action: Action) -> None:
        """Post the buffer of a tensor that `take` hands out."""
        with self._streams.receiving():
            message = post_receive(action.bytes, self._device, action.peer, self._network, _tag(action))
        if is_ahead(action.tensor):
            self._features.add(action, message)
            return
        key = (action.stage, action.microbatch, "<" in action.tensor)
        self._receives.setdefault(key, []).append((action, message))

    def send(self, action: Action, tensor: Tensor) -> None:
        """Start to send; the bytes are kept until they have left."""
        under_way = {key: [sent for sent in sends if not sent[1].left()] for key, sends in self._sends.items()}
        self._sends = {key: sends for key, sends in under_way.items() if sends}
        with self._streams.sending(tensor):
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            part = flat[action.offset : action.offset + action.bytes]
            message = post_send(part, action.peer, self._network, _tag(action))
        self._sends.setdefault((action.tensor, action.microbatch), []).append((action, message))

    def take(self, stage: int, microbatch: int, *, gradients: bool) -> dict[str, Tensor]:
        """Wait for what was received for the forward or backward of a stage's microbatch."""
        parts: dict[str, list[Tensor]] = {}
        for action, message in self._receives.pop((stage, microbatch, gradients), ()):
            self._position.wait(_peer(action))
            parts.setdefault(named_by_layers(action.tensor), []).append(message.there())
            self._streams.taken(message.held)
        # gloo knows that a send has left only after a wait; gradients that are here prove that these are free.
        for tensor in parts if gradients else ():
            for sent in self._sends.pop((tensor.replace("<", ">"), microbatch), ()):
                self._wait(*sent)
        self._position.wait("")
        return {tensor: found[0] if len(found) == 1 else torch.cat(found) for tensor, found in parts.items()}

    def features_bytes(self) -> int:
        """Of this step, until they are read, and of the next one."""
        here = chain.from_iterable(self._receives.values())
        return self._features.kept_bytes() + sum(a.bytes for a, _ in here if is_ahead(a.tensor))

    def drain(self) -> None:
        """Wait until every send has left."""
        for sent in chain.from_iterable(self._sends.values()):
            self._wait(*sent)
        self._sends.clear()

    def _wait(self, action: Action, message: Message) -> None:
        self._position.wait(_peer(action))
        message.work.wait()


def _made(action: Action) -> tuple[str, int]:
    """What its stage has made of what an action sends."""
    return named_by_layers(action.tensor), action.microbatch


def _peer(action: Action) -> str:
    """Whom a transfer waits for, as a position says it; empty for other actions."""
    if action.kind not in ("SEND", "RECV"):
        return ""
    return f"{action.peer} {action.kind}:{action.tensor} {action.microbatch}"


def _tag(action: Action) -> int:
    return zlib.crc32(f"{action.tensor}@{action.microbatch}".encode()) % _TAGS
