"""All steps as a trace, ranges for profilers, and tensors that go through host memory."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from tiny_plans import FOUR_STAGES, TWO_STAGES, hand_plan, tiny_scenario

from mmplan.planner.modalities import stage_modalities
from mmplan.planner.prediction import TimedAction
from mmplan.planner.program import Action, RankProgram
from mmplan.runtime import network, ranges
from mmplan.runtime.clock import CudaClock
from mmplan.runtime.devices import backend_of, run_device
from mmplan.runtime.groups import peer_pairs
from mmplan.runtime.ranges import action_range, range_name
from mmplan.runtime.trace import TracedStep, trace_events
from mmplan.runtime.train import RankStep

CPU = torch.device("cpu")


def traced(rank: int, actions: list[Action], starts: list[float], step: int, started_s: float) -> TracedStep:
    """A step whose computes last 10 ms; each was asked for 2 ms before it started."""
    computes = [action for action in actions if action.kind not in ("SEND", "RECV")]
    done = RankStep(
        program=RankProgram(rank=rank, stage=rank, replica=0, actions=tuple(actions)),
        started_s=started_s,
        timeline=tuple(TimedAction(rank, a, s, s + 0.010) for a, s in zip(computes, starts, strict=True)),
        asked_s=tuple(start - 0.002 if start else 0.0 for start in starts),
        losses={"llm": 1.5},
        wait_s=0.0,
        activation_bytes=0,
        gradient_bytes=0,
        reduce_bytes=0,
        tensor_bytes=0,
        peak_memory_bytes=0,
    )
    return TracedStep(step=step, rank=done)


def test_a_trace_has_all_steps_waits_and_an_arrow_for_each_tensor() -> None:
    first = [Action("F", 0, 0), Action("SEND", 0, 0, 1, "a>b", 8)]
    second = [Action("RECV", 1, 0, 0, "a>b", 8), Action("F", 1, 0)]
    runs = [
        [traced(0, first, [0.0], step, 100.0 + step) for step in range(2)],
        [traced(1, second, [0.013], step, 100.0 + step) for step in range(2)],
    ]
    events = trace_events(runs, {0: "vision", 1: "text"})
    slices = [(e["pid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["cat"] in ("F", "wait")]
    assert slices[:3] == [
        (0, "vision stage 0 F microbatch 0", 0.0, 10_000.0),
        (1, "text stage 1 F microbatch 0", pytest.approx(13_000.0), pytest.approx(10_000.0)),
        (1, "for 1F0", pytest.approx(11_000.0), pytest.approx(2_000.0)),
    ]
    assert [start for _, _, start, _ in slices[3:]] == pytest.approx([1_000_000.0, 1_013_000.0, 1_011_000.0])
    arrows = [(e["ph"], e["pid"], round(e["ts"])) for e in events if e["ph"] in "sf"]
    assert arrows == [("s", 0, 10_000), ("f", 1, 13_000), ("s", 0, 1_010_000), ("f", 1, 1_013_000)]
    assert len({e["id"] for e in events if e["ph"] == "s"}) == 2


def test_ranges_name_modality_stage_and_microbatch_on_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    fake = SimpleNamespace(range_push=heard.append, range_pop=lambda: heard.append("pop"), mark=str)
    ranges._named.cache_clear()
    monkeypatch.setattr(torch.cuda, "nvtx", fake)
    with action_range(Action("F", 0, 3), {0: "vision"}, CPU):
        pass
    assert heard == []
    with action_range(Action("F", 0, 3), {0: "vision"}, torch.device("cuda", 0)):
        pass
    assert heard == ["vision stage 0 F microbatch 3", "pop"]
    with pytest.raises(ValueError), action_range(Action("B", 0, 3), {}, torch.device("cuda", 0)):
        raise ValueError
    assert heard[2:] == ["stage 0 B microbatch 3", "pop"]
    assert range_name(Action("STEP", 1), {1: "text"}) == "text stage 1 STEP"


def test_a_build_of_torch_without_ranges_runs_without_them() -> None:
    ranges._named.cache_clear()  # that of these tests is one: it is for CPUs
    if not torch.cuda.is_available():
        with action_range(Action("F", 0, 3), {0: "vision"}, torch.device("cuda", 0)):
            pass
    ranges._named.cache_clear()


class FakeEvent:
    """Of a device whose clock is a list of milliseconds; not to be read before the device has been waited for."""

    now_ms, made = 0.0, 0
    running: ClassVar[set["FakeEvent"]] = set()

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at_ms: float | None = None
        FakeEvent.made += 1

    def record(self) -> None:
        self.at_ms = FakeEvent.now_ms
        self.running.add(self)

    def elapsed_time(self, other: "FakeEvent") -> float:
        assert other not in self.running and self.at_ms is not None and other.at_ms is not None
        return other.at_ms - self.at_ms


def test_the_clock_of_a_gpu_reads_events_behind_a_meeting_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for the device before and behind a step, and no second step makes an event anew."""
    order: list[str] = []

    def synchronize() -> None:
        order.append("synchronize")
        FakeEvent.running.clear()

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(dist, "barrier", lambda group: order.append("barrier"))
    clock = CudaClock(SimpleNamespace())  # type: ignore[arg-type]
    for begins_ms in (5.0, 100.0):
        FakeEvent.now_ms = begins_ms
        order.clear()
        clock.start()
        assert order == ["synchronize", "barrier"]
        marks = []
        for FakeEvent.now_ms in (begins_ms + 7.5, begins_ms + 9.0):
            marks.append(clock.mark())
        with pytest.raises(AssertionError):
            clock.seconds(marks[0])
        clock.stop()
        assert [clock.seconds(mark) for mark in marks] == pytest.approx([0.0075, 0.009])
        assert order == ["synchronize", "barrier", "synchronize"]
    assert FakeEvent.made == 3


def test_processes_share_gpus_only_when_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", set_to.append)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    plan = hand_plan(tiny_scenario(), TWO_STAGES)
    pool = plan.scenario.cluster.pools[0]
    on_gpu = SimpleNamespace(scenario=SimpleNamespace(cluster=SimpleNamespace(pools=[_gpu(pool)])))
    assert run_device(on_gpu, rehearse=False, share=True) == torch.device("cuda", 1) == set_to[0]  # type: ignore[arg-type]
    with pytest.raises(Exception, match=r"4 processes on this machine, and 2 CUDA devices.*--share-devices"):
        run_device(on_gpu, rehearse=False)  # type: ignore[arg-type]
    assert run_device(plan, rehearse=False, share=True) == CPU
    assert backend_of(torch.device("cuda", 1), share=True) == backend_of(CPU, share=False) == "gloo"
    assert backend_of(torch.device("cuda", 1), share=False) == "nccl"


def _gpu(pool: Any) -> SimpleNamespace:
    return SimpleNamespace(device=SimpleNamespace(name="h200"))


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    """A gloo group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_tensors_go_through_host_memory_and_come_back(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the copies are real, only the device is the same."""
    monkeypatch.setattr(network, "through_host", lambda device, group: True)
    x = torch.arange(4.0)
    network.all_reduce(x, alone)
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
    whole, share = torch.zeros(4), torch.zeros(4)
    network.gather(whole, x, alone)
    network.scatter_sum(share, whole, alone)
    assert whole.tolist() == share.tolist() == x.tolist()
    swapped = torch.zeros(4, 1)
    network.all_to_all(swapped, x.unsqueeze(1), [4], [4], alone)
    assert swapped.squeeze(1).tolist() == x.tolist()


def test_pairs_meet_in_one_order_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[int, list[tuple[str, int]]] = {}
    for rank in range(4):
        said[rank] = []
        monkeypatch.setattr(network, "send", lambda flat, peer, group, own=said[rank]: own.append(("to", peer)))
        monkeypatch.setattr(network, "receive", lambda n, d, peer, group, own=said[rank]: own.append(("from", peer)))
        network.connect([(2, 0), (0, 1), (3, 2), (2, 0)], rank, CPU, None)  # type: ignore[arg-type]
    assert said[0] == [("to", 1), ("from", 1), ("to", 2), ("from", 2)]
    assert said[2] == [("from", 0), ("to", 0), ("to", 3), ("from", 3)]
    assert said[3] == [("from", 2), ("to", 2)]


def test_ranks_that_send_each_other_tensors_are_those_of_joined_stages() -> None:
    plan = hand_plan(tiny_scenario(), FOUR_STAGES, dp=2)
    # vision and audio (stages 0 and 1) feed the first half of the language model, that the second
    assert peer_pairs(plan) == {(0, 4), (1, 5), (2, 4), (3, 5), (4, 6), (5, 7)}
    assert stage_modalities(plan) == {0: "vision", 1: "audio", 2: "text", 3: "text"}
