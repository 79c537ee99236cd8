"""Which stream of a GPU waits for which, as told to torch: a step of the executor on a CUDA that writes down what it is
asked for."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_stage_and_executor import LocalClock, OneTensorStage
from torch import Tensor

from mmplan.planner.program import Action, RankProgram
from mmplan.runtime import executor, ranges, streams
from mmplan.runtime.executor import run_step
from mmplan.runtime.network import Message
from mmplan.runtime.streams import CudaStreams, OneStream, streams_of

CUDA = torch.device("cuda", 0)


class FakeCuda:
    """Streams by name; `told`: each call with the stream that is current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        self.current, self._names = FakeStream(self, "compute"), iter(("receives", "sends", "sums"))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(self, next(self._names)))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(Tensor, "record_stream", lambda _, stream: self.told.append(f"kept for {stream.name}"))
        monkeypatch.setattr(Tensor, "is_cuda", True)
        for name in ("synchronize", "Event"):
            monkeypatch.setattr(torch.cuda, name, lambda *_, **__: pytest.fail("the host waits"))

    @contextmanager
    def on(self, stream: "FakeStream") -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def tell(self, what: str) -> None:
        self.told.append(f"{what} on {self.current.name}")


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_stream(self, other: "FakeStream") -> None:
        self._cuda.told.append(f"{self.name} wait for {other.name}")


class Work:
    def __init__(self, cuda: FakeCuda, what: str) -> None:
        self._cuda, self._what = cuda, what

    def wait(self) -> None:
        self._cuda.tell(f"wait for {self._what}")

    def is_completed(self) -> bool:
        return False


class ToldStage(OneTensorStage):
    """Says what it is asked for."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def forward(self, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self._cuda.tell(f"F{microbatch} of {sorted(received)}")
        return {"a>b": torch.ones(6).view(2, 3).t()}

    def backward(self, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self._cuda.tell(f"B{microbatch} of {sorted(received)}")
        return {}

    def reduce(self) -> None:
        self._cuda.tell("reduce")

    def step(self) -> None:
        self._cuda.tell("step")


def test_communication_runs_beside_compute_and_the_host_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    heard: list[str] = []
    monkeypatch.setattr(ranges, "_named", lambda: True)
    monkeypatch.setattr(torch.cuda, "nvtx", SimpleNamespace(range_push=heard.append, range_pop=lambda: None))

    def post_receive(size: int, device: torch.device, peer: int, *_: Any) -> Message:
        cuda.tell("receive")
        return Message(torch.zeros(size, dtype=torch.uint8), torch.device("cpu"), Work(cuda, "receive"))  # type: ignore[arg-type]

    def post_send(flat: Tensor, *_: Any) -> Message:
        cuda.tell(f"send {flat.nbytes} bytes")
        return Message(flat, torch.device("cpu"), Work(cuda, "send"))  # type: ignore[arg-type]

    monkeypatch.setattr(executor, "post_receive", post_receive)
    monkeypatch.setattr(executor, "post_send", post_send)
    made = CudaStreams(CUDA)
    monkeypatch.setattr(executor, "streams_of", lambda device: made)
    actions = (
        Action("RECV", 0, 0, 1, "z>a", 8),
        Action("F", 0, 0),
        Action("RECV", 0, 0, 1, "a<b", 24),
        Action("SEND", 0, 0, 1, "a>b", 24),
        Action("B", 0, 0),
        Action("REDUCE", 0),
        Action("STEP", 0),
    )
    program = RankProgram(rank=0, stage=0, replica=0, actions=actions)
    record = run_step(program, {0: ToldStage(cuda)}, device=CUDA, clock=LocalClock(), modalities={0: "text"})
    assert cuda.told == [
        "receive on receives",
        "wait for receive on compute",
        "kept for compute",
        "F0 of ['z>a'] on compute",
        "receive on receives",
        "sends wait for compute",
        "kept for sends",
        "send 24 bytes on sends",
        "wait for receive on compute",
        "kept for compute",
        "wait for send on compute",
        "B0 of ['a<b'] on compute",
        "sums wait for compute",
        "reduce on sums",
        "compute wait for sums",
        "step on compute",
    ]
    kinds = ("RECV microbatch 0", "F microbatch 0", "RECV microbatch 0", "SEND microbatch 0", "B microbatch 0")
    assert heard == [f"text stage 0 {kind}" for kind in (*kinds, "REDUCE", "STEP")]
    assert [action.kind for action, *_ in record.marks] == ["F", "B", "REDUCE", "STEP"]
    assert record.activation_bytes == 24


def test_a_cpu_has_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "CudaStreams", lambda device: pytest.fail("no CUDA here"))
    assert isinstance(streams_of(torch.device("cpu")), OneStream)
