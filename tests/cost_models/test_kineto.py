"""Traces of the PyTorch profiler: seconds counted once, steps found, causes of idle time named."""

from pathlib import Path
from typing import Any

import pytest
from kineto_events import (
    ALL_REDUCE,
    AUTOGRAD,
    GEMM,
    by_name,
    call,
    collective,
    kernel,
    launched,
    mark,
    only_rank,
    operator,
    span,
    two_steps,
    write,
)  # fmt: skip

from mmplan.cost_models.formats.trace_reading import read_kineto


def test_each_moment_is_counted_once(tmp_path: Path) -> None:
    rank = only_rank(read_kineto([write(tmp_path / "t.json", two_steps())]))
    (device,) = rank["devices"]
    assert rank["step_s"] == [0.02, 0.02] and rank["window_s"] == 0.04
    # per step: products 8 + 3 ms, all-reduce 4 ms of which 2 ms are alone, the rest of 20 ms idle
    assert device["compute_s"] == pytest.approx(0.022)
    assert (device["communication_s"], device["exposed_communication_s"]) == pytest.approx((0.008, 0.004))
    parts = ("compute_s", "exposed_communication_s", "exposed_copy_s", "idle_s")
    assert sum(device[part] for part in parts) == pytest.approx(rank["window_s"])
    assert by_name(rank["classes"])["gemm"]["count"] == 4


def test_of_operators_with_the_same_span_the_one_that_was_called_first_holds_the_other(tmp_path: Path) -> None:
    """At whole microseconds a call and the call inside it often have one span; their ids ascend."""
    named = (("aten::empty", 100, 9), ("aten::zeros", 100, 8), ("aten::zeros", 200, 10), ("aten::empty", 200, 11))
    events = [operator(name, at, 10, **{"External id": number}) for name, at, number in named]
    for order in (events, events[::-1]):
        seconds = by_name(only_rank(read_kineto([write(tmp_path / "t.json", order)]))["operators"])
        assert seconds["aten::empty"]["seconds"] == pytest.approx(20e-6)
        assert seconds["aten::zeros"]["seconds"] == pytest.approx(0.0)


def test_forward_and_backward_are_told_apart_by_autograd(tmp_path: Path) -> None:
    phases = by_name(only_rank(read_kineto([write(tmp_path / "t.json", two_steps())]))["phases"])
    assert phases["forward"]["seconds"] == pytest.approx(0.016)
    assert phases["backward"]["seconds"] == pytest.approx(0.006)
    assert phases["other"]["seconds"] == pytest.approx(0.008)  # the all-reduce


def test_a_collective_has_its_size_and_group(tmp_path: Path) -> None:
    (message,) = only_rank(read_kineto([write(tmp_path / "t.json", two_steps())]))["messages"]
    assert (message["collective"], message["bytes"], message["ranks"], message["count"]) == (
        "all_reduce",
        2_000_000,
        2,
        2,
    )


def test_an_idle_gap_after_a_synchronisation_is_named(tmp_path: Path) -> None:
    reading = read_kineto([write(tmp_path / "t.json", two_steps())])
    gaps = [gap for gap in only_rank(reading)["gaps"] if gap["kind"] == "idle"]
    assert [gap["length_s"] for gap in gaps] == pytest.approx([0.007, 0.0069])
    assert "cudaDeviceSynchronize" in gaps[0]["cause"]
    assert any("idle for 7 ms" in sentence for sentence in reading.warnings)


@pytest.mark.parametrize(
    ("host", "cause"),
    [
        ([mark("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 1_500, 8_000)], "data loading"),
        ([call("cudaMalloc", 1_500, 8_000)], "memory allocation (cudaMalloc)"),
        ([call("hipFree", 1_500, 8_000)], "memory allocation (hipFree)"),
        ([operator("aten::item", 900, 8_900), call("cudaStreamSynchronize", 950, 8_000)], ".item()"),
        ([call("cudaStreamSynchronize", 900, 8_900)], "host synchronisation (cudaStreamSynchronize)"),
        ([call("cudaMemcpyAsync", 1_500, 8_000)], "a copy to or from the host"),
        ([call("cuModuleLoadData", 1_500, 8_000)], "compilation or loading of kernels"),
        ([operator("c10d::barrier", 1_500, 8_000)], "waiting for a collective (c10d::barrier)"),
        ([], "nothing recorded on the host"),
        ([operator("aten::to", 1_100, 8_500)], "the host's own work"),
        ([span("python_function", "tokenizer.py(12): encode", 1_100, 8_500)], "the host's own work"),
    ],
)
def test_the_cause_of_an_idle_device_is_what_its_host_did(tmp_path: Path, host: list[Any], cause: str) -> None:
    events = [
        mark("ProfilerStep#1", 0, 20_000),
        *launched(GEMM, 500, 500, 1),
        *host,
        *launched(GEMM, 10_000, 10_000, 2),
    ]
    (gap,) = only_rank(read_kineto([write(tmp_path / "t.json", events)]))["gaps"]
    assert gap["length_s"] == pytest.approx(0.009)
    assert gap["cause"].startswith(cause)


def test_an_item_that_drained_the_device_is_named(tmp_path: Path) -> None:
    events = [mark("ProfilerStep#1", 0, 20_000), *launched(GEMM, 500, 500, 1), operator("aten::item", 600, 420)]
    events += [
        call("cudaStreamSynchronize", 650, 360),
        operator("aten::to", 1_100, 8_000),
        *launched(GEMM, 10_000, 10_000, 2),
    ]
    (gap,) = only_rank(read_kineto([write(tmp_path / "t.json", events)]))["gaps"]
    assert gap["cause"].startswith("host synchronisation (aten::item, cudaStreamSynchronize), then the host's own work")


def test_work_after_the_last_step_is_no_part_of_it(tmp_path: Path) -> None:
    lag = launched(GEMM, 40_500, 2_000, 77)
    lag[0]["ts"] = 1_039_000  # launched in the last step
    lag[1]["ts"] = 1_041_000
    later = [event | {"ts": event["ts"] + 5_000_000} for event in launched(GEMM, 0, 9_000, 78)]
    rank = only_rank(read_kineto([write(tmp_path / "t.json", [*two_steps(), *lag, *later])]))
    assert rank["step_s"] == [0.02, 0.02]
    assert rank["window_s"] == pytest.approx(0.043)  # both steps and the tail of what they launched


def test_a_gap_below_five_milliseconds_is_none(tmp_path: Path) -> None:
    events = [*launched(GEMM, 500, 500, 1), *launched(GEMM, 5_999, 500, 2), *launched(GEMM, 11_499, 500, 3)]
    (gap,) = only_rank(read_kineto([write(tmp_path / "t.json", events)]))["gaps"]
    assert gap["length_s"] == pytest.approx(0.005)


def test_a_long_call_of_a_size_is_waiting_for_another_rank(tmp_path: Path) -> None:
    events = [
        *launched(ALL_REDUCE, 100, 1_000, 1, **collective(500)),
        *launched(ALL_REDUCE, 2_000, 12_000, 2, **collective(500)),
    ]
    (gap,) = only_rank(read_kineto([write(tmp_path / "t.json", events)]))["gaps"]
    assert gap["kind"] == "communication only"
    assert gap["cause"].startswith("waiting for another rank in all_reduce of 1,000 B: 12 ms, the fastest call")


def test_dense_short_waits_for_a_lock_are_a_cluster(tmp_path: Path) -> None:
    waits = [
        span(
            "python_function",
            "<built-in method acquire of _thread.lock object at 0x7f>",
            5_000 + 40 * i,
            8,
            tid=100 + i % 2,
        )
        for i in range(50)
    ]
    (cluster,) = only_rank(read_kineto([write(tmp_path / "t.json", [*two_steps(), *waits])]))["locks"] or [None]
    assert (cluster["waits"], cluster["threads"]) == (50, 2)
    assert 24 < cluster["per_ms"] < 27  # one each 40 us
    assert cluster["cause"].startswith("the interpreter lock, taken in turns by 2 threads")


def test_sparse_or_long_waits_for_a_lock_are_no_cluster(tmp_path: Path) -> None:
    name = "pthread_mutex_lock"
    sparse = [span("python_function", name, 5_000 + 200 * i, 8) for i in range(50)]
    long = [span("python_function", name, 50_000 + 90 * i, 600, tid=300 + i) for i in range(50)]
    assert only_rank(read_kineto([write(tmp_path / "t.json", [*two_steps(), *sparse, *long])]))["locks"] == []


def test_kernels_of_two_devices_in_one_file_are_not_added_up(tmp_path: Path) -> None:
    events = [
        kernel(GEMM, 0, 1_000, device=0),
        kernel(ALL_REDUCE, 0, 1_000, device=1),
        kernel(GEMM, 0, 1_000, device=1),
    ]
    devices = only_rank(read_kineto([write(tmp_path / "t.json", events)]))["devices"]
    assert [(d["device"], d["compute_s"], d["exposed_communication_s"]) for d in devices] == [
        (0, 1e-3, 0),
        (1, 1e-3, 0),
    ]


def test_steps_are_found_by_ranges_that_repeat(tmp_path: Path) -> None:
    events = [mark(f"train_step {i}", 1_000 * i, 900) for i in range(4)] + [kernel(GEMM, 100, 3_200)]
    rank = only_rank(read_kineto([write(tmp_path / "t.json", events)]))
    assert (rank["marked_by"], rank["step_s"]) == ("train_step #", pytest.approx([1e-3, 1e-3, 1e-3, 0.9e-3]))


def test_steps_are_found_by_the_optimizer_where_nothing_else_repeats(tmp_path: Path) -> None:
    events = [mark("Optimizer.step#AdamW.step", 1_000 * i, 100) for i in range(3)] + [kernel(GEMM, 100, 2_000)]
    rank = only_rank(read_kineto([write(tmp_path / "t.json", events)]))
    assert (rank["marked_by"], rank["step_s"]) == ("ends of Optimizer.step", pytest.approx([1e-3, 1e-3]))


def test_modules_of_a_multimodal_model_have_their_seconds(tmp_path: Path) -> None:
    def forward(module: str, at: float, correlation: int, sequence: int) -> list[Any]:
        return [
            span("python_function", f"nn.Module: {module}", at - 20, 40),
            operator("aten::mm", at - 15, 30, **{"Sequence number": sequence, "Fwd thread id": 0}),
            *launched(GEMM, at, 100, correlation),
        ]

    def backward(at: float, dur: float, correlation: int, sequence: int) -> list[Any]:
        number = {"Sequence number": sequence, "Fwd thread id": 1}
        return [
            operator("autograd::engine::evaluate_function: MmBackward0", at - 15, 30, tid=AUTOGRAD, **number),
            *launched(GEMM, at, dur, correlation, tid=AUTOGRAD),
        ]

    events = [*forward("SiglipVisionModel_0", 1_000, 1, 11), *forward("LlavaMultiModalProjector_0", 2_000, 2, 12)]
    events += [*forward("LlamaModel_0", 3_000, 3, 13), *forward("LlamaModel_0", 4_000, 4, 14)]
    events += [*backward(5_000, 200, 5, 14), *backward(6_000, 300, 6, 13), *backward(7_000, 50, 7, 11)]
    parts = by_name(only_rank(read_kineto([write(tmp_path / "t.json", events)]))["parts"])
    assert {
        name: (p["calls"], round(p["forward_s"] * 1e6), round(p["backward_s"] * 1e6)) for name, p in parts.items()
    } == {
        "vision": (1, 100, 50),
        "projector": (1, 100, 0),
        "text": (2, 200, 500),
    }


def test_a_vision_tower_inside_what_is_called_like_a_language_model_counts_apart(tmp_path: Path) -> None:
    events = [
        span("python_function", "nn.Module: Gemma3Model_0", 0, 1_000),
        span("python_function", "modeling_clip.py(7): forward", 0, 1_000),  # a file's name says nothing
        span("python_function", "nn.Module: SiglipVisionModel_0", 10, 200),
        *launched(GEMM, 50, 70, 1),
        span("python_function", "nn.Module: Gemma3TextModel_0", 300, 200),
        *launched(GEMM, 350, 90, 2),
    ]
    parts = by_name(only_rank(read_kineto([write(tmp_path / "t.json", events)]))["parts"])
    assert {name: round(p["forward_s"] * 1e6) for name, p in parts.items()} == {"text": 90, "vision": 70}
