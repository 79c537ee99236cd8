"""Logs of trainings become records of measured runs: typical steps, memory, configuration, a row for the backtest."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmplan.commands.import_kinds import read_files
from mmplan.errors import InputError
from mmplan.planner.measured import read_measured
from mmplan.planner.row_job import RowJob, row_job
from mmplan.report.formats import reading_text
from mmplan.scenario.formats.logs.lines import iterations_in, memory_in
from mmplan.scenario.formats.reading import Reading

START = """using world size: 16, data-parallel-size: 2, tensor-model-parallel size: 4, pipeline-model-parallel size: 2
using torch.bfloat16 for parameters ...
------------------------ arguments ------------------------
  bf16 ............................................ True
  fp16 ............................................ False
  ffn_hidden_size ................................. 14336
  group_query_attention ........................... True
  hidden_size ..................................... 4096
  micro_batch_size ................................ 2
  num_attention_heads ............................. 32
  num_layers ...................................... 32
  num_query_groups ................................ 8
  padded_vocab_size ............................... 128256
  recompute_granularity ........................... selective
  seq_length ...................................... 4096
  sequence_parallel ............................... True
  swiglu .......................................... True
  use_distributed_optimizer ....................... True
-------------------- end of arguments ---------------------
"""


def line(step: int, milliseconds: float, *, label: str = "", rest: str = "", batch: int = 64, skipped: int = 0) -> str:
    return (
        f"{label} iteration {step:8d}/     100 | consumed samples: {step * batch:12d} | "
        "elapsed time per iteration (ms): "
        f"{milliseconds:.1f} | learning rate: 1.0E-04 | global batch size: {batch:5d} | lm loss: 1.2E+01 | {rest}"
        f"number of skipped iterations: {skipped:3d} | number of nan iterations:   0 |\n"
    )


def record(tmp_path: Path, text: str, name: str = "train_A100-80G.log") -> Reading:
    (tmp_path / name).write_text(text)
    return read_files([str(tmp_path / name)])


def told(read: Reading) -> str:
    return "\n".join((*read.read, *read.warnings))


SIZES = "memory (MB) | allocated: 10.0 | max allocated: 20.0 | reserved: 30.0 | max reserved: 40.0"
STEPS = line(1, 9000) + "".join(line(step, 2000 + step) for step in range(2, 12))


def test_typical_steps_stand_without_warm_up_and_outliers(tmp_path: Path) -> None:
    text = START + STEPS + "saving checkpoint at iteration 11 to /ckpt\n" + line(12, 7000) + line(13, 2013)
    read = record(tmp_path, text)
    step = read.fragment["step"]
    assert isinstance(step, dict)
    assert (step["median_s"], step["steps"], step["warm_up_steps"], step["outliers"]) == (2.007, 11, 1, 1)
    assert (step["p10_s"], step["p90_s"]) == (2.003, 2.011)
    assert "step 12 took 7 s, behind a checkpoint" in told(read)
    assert read.fragment["tokens_per_s"] == pytest.approx(64 * 4096 / 2.007, abs=0.1)


def test_the_row_of_a_log_is_priced_by_the_backtest(tmp_path: Path) -> None:
    read = record(tmp_path, START + STEPS)
    (tmp_path / "row.csv").write_text(reading_text(read, tmp_path / "row.csv"))
    (row,) = read_measured(tmp_path / "row.csv")
    job = row_job(row)
    assert isinstance(job, RowJob)
    assert (job.step_s, job.degrees.tp, job.degrees.pp, job.degrees.dp, job.degrees.microbatches) == (
        2.0065,
        4,
        2,
        2,
        16,
    )
    assert job.scenario.cluster.pools[0].device.name == "a100-sxm-80"
    assert job.scenario.technique.recompute == "selective"


def test_what_a_row_lacks_is_said(tmp_path: Path) -> None:
    read = record(tmp_path, STEPS, "train.log")
    lacking = "layers, hidden, sequence length, number of GPUs, kind of GPU"
    assert f"to price it as a measured row there are missing: {lacking}" in told(read)


def test_a_log_gives_the_scenario_of_its_run_too(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(START + STEPS)
    read = read_files(["megatron", str(tmp_path / "run.log")])
    assert read.document == "scenario"
    assert read.fragment["recipes"]["present"]["tp"] == 4  # type: ignore[index]
    assert read.fragment["cluster"]["nodes"] == 2  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (" iteration 3/ 10 | elapsed time per iteration (ms): 1500.0 | lm loss: 1 |", 1.5),
        (" iteration 3/ 10 | elapsed time per iteration (s): 1.5 | lm loss: 1 |", 1.5),
        ("3:  iteration 3/ 10 | elapsed time per iteration (ms): 1500.0 | lm l", 1.5),
        ("[2024-03-30 20:02:40] iteration 3/ 10 | elapsed time per iteration (ms): 1500.0 |", 1.5),
        (" iteration 3/ 10 | elapsed time per iteration (ms): 150", None),
        (
            "Training epoch 0, iteration 3/99 | lr: 1e-6 | global_batch_size: 8 | train_step_timing in s: 1.5 | x: 2",
            1.5,
        ),
        (
            "Epoch 0:  30%|# | 3/10 [00:30<01:10, reduced_train_loss=9.1, global_step=2.0, train_step_timing in s=1.5]",
            1.5,
        ),
        ("steps: 3 loss: 9.1234 iter time (s): 1.500 samples/sec: 7.4", 1.5),
        (" iteration 3/ 10 | elapsed time per iteration (ms): nan | lm loss: 1 |", None),
        (" iteration 3/ 10 | elapsed time per iteration (ms): -4.0 | lm loss: 1 |", None),
    ],
)
def test_the_seconds_of_a_line_follow_its_words(text: str, seconds: float | None) -> None:
    (iteration,) = iterations_in(text, 1)
    assert (iteration.step, iteration.seconds) == (3, seconds)


def test_two_iterations_glued_into_one_line_are_two(tmp_path: Path) -> None:
    glued = line(2, 2000).rstrip("\n") + line(3, 2100)
    assert [i.seconds for i in iterations_in(glued, 1)] == [2.0, 2.1]


@pytest.mark.parametrize(
    ("text", "rank", "reserved"),
    [
        (f"after 1 iterations {SIZES}", None, 40 << 20),
        (f"==> Memory | [stage 5, virtual 0, rank 7] {SIZES}", 7, 40 << 20),
        ("[Rank 0] (after 1 iterations) memory (GB) | mem-max-reserved-gigabytes: 2.5 |", 0, 2_500_000_000),
        ("MA 1.0 GB         Max_MA 2.0 GB         CA 3.0 GB         Max_CA 4 GB", None, 4 << 30),
    ],
)  # fmt: skip
def test_memory_lines_are_bytes_of_a_rank(text: str, rank: int | None, reserved: int) -> None:
    memory = memory_in(text)
    assert memory is not None
    assert (memory.rank, memory.max_reserved_bytes) == (rank, reserved)


def test_ranks_that_repeat_an_iteration_count_once_and_a_restart_is_a_run_of_its_own(tmp_path: Path) -> None:
    both = "".join(line(step, 2000, label="0:") + line(step, 2001, label="1:") for step in range(1, 6))
    read = record(tmp_path, both)
    assert "5 lines repeat an iteration" in told(read)
    again = record(tmp_path, START + STEPS + "".join(line(step, 3000) for step in range(5, 9)))
    assert "2 runs stand in the file: run 1 with 11 iterations is read" in told(again)


def test_skipped_steps_are_left_out_unless_there_are_no_others(tmp_path: Path) -> None:
    some = record(tmp_path, line(1, 9000, skipped=1) + line(2, 2500, skipped=1) + line(3, 2000) + line(4, 2000))
    assert some.fragment["step"]["median_s"] == 2.0  # type: ignore[index]
    none = record(tmp_path, line(1, 9000, skipped=1) + line(2, 2500, skipped=1) + line(3, 2500, skipped=1))
    assert none.fragment["step"]["median_s"] == 2.5  # type: ignore[index]
    assert "every step skipped its optimizer" in told(none)


def test_steps_of_another_batch_size_are_left_out(tmp_path: Path) -> None:
    growing = "".join(line(step, 1000, batch=32) for step in range(1, 4)) + "".join(
        line(step, 2000) for step in range(4, 12)
    )
    read = record(tmp_path, growing)
    assert read.fragment["step"]["median_s"] == 2.0  # type: ignore[index]
    assert "3 of another batch size" in told(read)


@pytest.mark.parametrize(
    ("rate", "sentence"),
    [(98.5, ""), (16 * 98.5, "the rate of all 16 GPUs together"), (40_000.0, "is impossible")],
)
def test_a_printed_rate_is_checked_by_arithmetic(tmp_path: Path, rate: float, sentence: str) -> None:
    # 6 x 8.03e9 parameters x 64 x 4096 tokens / (8.02 s x 16 GPUs) = 98.4 TFLOP/s
    field = f"throughput per GPU (TFLOP/s/GPU): {rate} | "
    text = START + "Total number of parameters in billions: 8.03\n"
    read = record(tmp_path, text + "".join(line(step, 8020, rest=field) for step in range(1, 9)))
    found = [warning for warning in read.warnings if "tflop" in warning]
    assert (not found) if not sentence else sentence in found[0]


def test_the_estimate_in_a_file_name_stands_beside_the_measurement(tmp_path: Path) -> None:
    read = record(tmp_path, START + STEPS, "gpt_32layers_megatron_est_1900_rank0_a10g.log")
    assert read.fragment["estimate_s"] == 1.9
    assert "1.9 s a step: 0.95 x measured" in told(read)


def test_the_precision_that_a_line_says_counts_without_an_argument(tmp_path: Path) -> None:
    unsaid = "".join(line for line in START.splitlines(keepends=True) if "16 ......" not in line)
    read = record(tmp_path, unsaid + STEPS)
    assert dict(read.fragment["configuration"])["precision"] == "bf16"  # type: ignore[call-overload]


def test_a_log_without_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not the log of a training"):
        read_files(["megatron-log", str(record_file(tmp_path, "hello\nworld\n"))])


def record_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "odd.log"
    path.write_text(text)
    return path


ODD = ("|", ":", "iteration 5/", "memory (MB) |", "\r", "\x00", " train_step_timing in s=", "....", "\n", "9" * 40)
PIECES = [*START.splitlines(keepends=True), *STEPS.splitlines(keepends=True), *ODD, "rank (3, 4): ", "[default0]:"]


@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=40), cut=st.integers(0, 400))
def test_no_mix_of_log_lines_breaks_the_reader(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str], cut: int
) -> None:
    path = tmp_path_factory.mktemp("mixed") / "mixed.log"
    path.write_text("".join(pieces)[cut:])
    try:
        read_files(["megatron-log", str(path)])
    except InputError as error:
        assert error.file == path
