"""Logs of Hugging Face Trainer, torchtitan, DeepSpeed, ms-swift, LLaMA-Factory, Lightning: what they say of a step."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mmplan.commands.export_targets import TARGETS
from mmplan.commands.import_kinds import KINDS, read_files
from mmplan.errors import InputError
from mmplan.scenario.formats.reading import Reading

HEADER = """***** Running training *****
  Num examples = 4,000
  Num Epochs = 1
  Instantaneous batch size per device = 2
  Total train batch size (w. parallel, distributed & accumulation) = 64
  Gradient Accumulation steps = 4
  Total optimization steps = 60
  Number of trainable parameters = 7,615,616,512
"""
LOSS = "{'loss': 1.2%02d, 'grad_norm': 0.9, 'learning_rate': 1e-05, 'epoch': 0.%02d}"
END = (
    "{'train_runtime': 240.0, 'train_samples_per_second': 16.0, 'train_steps_per_second': 0.25, 'train_loss': 1.1,"
    " 'epoch': 1.0}"
)


def read(folder: Path, text: str, name: str = "train.log") -> Reading:
    (folder / name).write_text(text)
    return read_files([str(folder / name)])


def step_of(reading: Reading) -> dict[str, Any]:
    step = reading.fragment["step"]
    assert isinstance(step, dict)
    return step


def told(reading: Reading) -> str:
    return "\n".join((*reading.read, *reading.ignored, *reading.warnings))


def bar(step: int, total: int, rate: str, before: str = " ") -> str:
    return f"{before}{100 * step // total:2d}%|###      | {step}/{total} [00:{step:02d}<04:30,  {rate}]"


def bars(total: int = 60) -> str:
    states = "\r".join(bar(step, total, f"{3.5 if step == 1 else 3.0}s/it") for step in range(1, total + 1))
    return "\r".join(f"{state}{LOSS % (i, i)}" if i % 10 == 0 else state for i, state in enumerate(states.split("\r")))


def test_the_trainers_bar_and_summary_give_step_batch_and_samples(tmp_path: Path) -> None:
    other = "\r".join(bar(step, 200, "90.0it/s") for step in range(1, 200))
    loading = "\r".join(bar(step, 400, "9.0s/it", "Loading checkpoint shards: ") for step in range(1, 300))
    reading = read(tmp_path, f"{loading}\n{HEADER}{bars()}\n{other}\n{END}\n")
    assert step_of(reading)["median_s"] == 3.0 and step_of(reading)["steps"] == 59
    assert reading.fragment["configuration"] == {"world": 8, "microbatch": 2, "global_batch": 64}
    assert reading.fragment["samples_per_s"] == pytest.approx(64 / 3)
    assert reading.fragment["printed_samples_per_s"] == 16.0
    assert "a progress bar" in told(reading) and "took 4 s a step, evaluations and checkpoints" in told(reading)
    assert "samples per second: 16 is printed, batch and step time give 21.33" in told(reading)


def test_the_bar_of_a_training_is_the_one_beside_the_losses(tmp_path: Path) -> None:
    other = "\r".join(bar(step, 200, "90.0it/s") for step in range(1, 200))
    assert step_of(read(tmp_path, f"{bars()}\n{other}\n{END}\n"))["median_s"] == 3.0


def test_a_summary_alone_gives_the_mean_of_the_whole_training_or_its_samples(tmp_path: Path) -> None:
    losses = "\n".join(LOSS % (i, i) for i in range(9))
    reading = read(tmp_path, f"{HEADER}{losses}\n{END}\n")
    assert step_of(reading)["median_s"] == 4.0
    assert "of the whole training: its start, evaluations and checkpoints are in it" in told(reading)
    assert reading.fragment["loss"] == {"first": 1.2, "last": 1.208}
    alone = read(tmp_path, END.replace("0.25", "0.02") + "\n")
    assert "step" not in alone.fragment and alone.fragment["printed_samples_per_s"] == 16.0
    assert "no line says how many steps there were" in told(alone)
    metrics = "***** train metrics *****\n  train_runtime            = 0:04:00.00\n  train_samples_per_second = 16.0\n"
    assert step_of(read(tmp_path, f"{HEADER}{metrics}"))["median_s"] == 4.0


def test_logs_are_called_by_what_wrote_them(tmp_path: Path) -> None:
    factory = '{"current_steps": %d, "total_steps": 90, "loss": 1.2, "elapsed_time": "0:0%d:00"}\n'
    assert read(tmp_path, "".join(factory % (10 * n, n) for n in range(1, 9))).kind == "training-log"
    assert read(tmp_path, f"{HEADER}{bars()}\n{END}\n").kind == "training-log"
    iteration = " iteration {:8d}/ 500 | elapsed time per iteration (ms): 100.0 | global batch size: 8 |\n"
    assert read(tmp_path, "".join(iteration.format(n) for n in range(1, 9))).kind == "megatron-log"


def test_xtuner_and_veomni_are_known_by_their_lines(tmp_path: Path) -> None:
    old = (
        "05/01 12:00:{:02d} - mmengine - INFO - Iter(train) [ {:4d}/3600]  lr: 2.1e-06  eta: 1:50:20  time: 1.8440  "
        "data_time: 0.0081  memory: 15433  loss: 1.6000\n"
    )
    reading = read(tmp_path, "".join(old.format(n, 10 * n) for n in range(1, 30)))
    assert (reading.kind, step_of(reading)["median_s"]) == ("training-log", 1.844)
    assert reading.fragment["memory"] == {"max_allocated_bytes": 15433 * 2**20}
    new = (
        "[XTuner][RANK 0][2025-09-01 12:00:00][INFO] Epoch 0 Step {}/100 data_time: 0.01 lr: 1e-6 time: 5.125 "
        "total_loss: 1.2 max_memory: 40.00 GB reserved_memory: 50.00 GB tgs: 1234.5\n"
    )
    reading = read(tmp_path, "".join(new.format(n) for n in range(1, 30)))
    assert step_of(reading)["median_s"] == 5.125
    assert reading.fragment["memory"] == {"max_allocated_bytes": 40 * 2**30, "max_reserved_bytes": 50 * 2**30}
    veomni = "\r".join(bar(step, 50, "3.00s/it, total_loss: 1.23", "Epoch 1/3: ") for step in range(1, 50))
    assert step_of(read(tmp_path, veomni))["median_s"] == 3.0


def test_a_bar_of_something_else_is_no_step(tmp_path: Path) -> None:
    """Shards that are loaded, beside lines of memory alone."""
    memory = "[Rank 0] (after 1 iterations) memory (MB) | allocated: 10.0 | max allocated: 20.0 | reserved: 30.0 |\n"
    other = "\r".join(bar(step, 8, "9.0s/it") for step in range(1, 9))
    (tmp_path / "train.log").write_text(f"using world size: 8\n{other}\n{memory}")
    assert "step" not in read_files([str(tmp_path / "train.log")]).fragment


@pytest.mark.parametrize("losses", ["'1.2'", "1.2"])
def test_losses_of_evaluations_are_no_training(tmp_path: Path, losses: str) -> None:
    with pytest.raises(InputError, match=r"not a kind of file|no line of an iteration"):
        read(
            tmp_path, f"{{'eval_loss': {losses}, 'eval_runtime': 3.2, 'eval_samples_per_second': 9, 'epoch': 1}}\n" * 4
        )


def test_code_that_prints_losses_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        read(tmp_path, "log = {'loss': loss.item(), 'epoch': epoch}\nprint(log)\n" * 3)


TITAN = (
    "[rank0]:[titan] 2025-03-01 12:{minute:02d}:{second:06.3f} - root - INFO - \x1b[31mstep: {step:2d}  "
    "\x1b[32mloss:  4.1234  \x1b[38;5;208mgrad_norm: 1.2  \x1b[33mmemory: 30.00GiB(31.70%)  "
    "\x1b[34mtps: {tps:,}  \x1b[36mtflops: 300.12  \x1b[35mmfu: 30.35%\x1b[39m\n"
)
TITAN_START = (
    "[rank0]:[titan] 2025-03-01 12:00:00,000 - root - INFO - Building device mesh with parallelism: pp=1, "
    "dp_replicate=1, dp_shard=8, cp=1, tp=2, ep=1, etp=1\n"
    "[rank0]:[titan] 2025-03-01 12:00:01,000 - root - INFO - CUDA capacity: NVIDIA H100 (0) with 94.99GiB memory\n"
    "[rank0]:[titan] 2025-03-01 12:00:02,000 - root - INFO - Model llama3 8B size: 8,030,261,248 total parameters\n"
    "[rank0]:[titan] 2025-03-01 12:00:02,500 - root - INFO - Applied selective activation checkpointing to the model\n"
    "[rank0]:[titan] 2025-03-01 12:00:02,600 - root - INFO - Applied FSDP to the model\n"
    "[rank0]:[titan] 2025-03-01 12:00:03,000 - root - INFO - Training starts at step 1, with local batch size 1, "
    "global batch size 8, sequence length 8192, total steps 1000 (warmup 200)\n"
)


def titan(tps: int = 2048) -> str:
    """Ten steps of 2 s between two lines; 8 x 8,192 tokens over 16 devices in 2 s are 2,048 a device and second."""
    lines = [
        TITAN.format(minute=index // 3, second=20.0 * (index % 3), step=10 * index, tps=tps) for index in range(1, 9)
    ]
    return TITAN_START + "".join(lines)


def test_torchtitan_says_its_step_by_the_clock_and_its_mesh(tmp_path: Path) -> None:
    reading = read(tmp_path, titan())
    assert step_of(reading)["median_s"] == 2.0
    assert reading.fragment["memory"] == {"max_reserved_bytes": 30 * 2**30}
    assert reading.fragment["parameters"] == 8030261248
    configuration = reading.fragment["configuration"]
    assert isinstance(configuration, dict)
    wanted = {"world": 16, "tp": 2, "global_batch": 8, "sequence": 8192, "microbatch": 1, "layers": 32}
    wanted |= {"recompute": "selective", "sharding": "parameters"}
    assert configuration.items() >= wanted.items()
    assert reading.fragment["printed_tokens_per_s_per_gpu"] == 2048
    assert reading.fragment["printed_tflops_per_gpu"] == 300.12
    assert reading.fragment["row"].items() >= {"stack": "torch-2025", "hidden": 4096, "gpus": 16, "gpu": "H100"}.items()  # type: ignore[attr-defined]
    assert "enough for a row of a table" in told(reading) and "counts otherwise" not in told(reading)


def test_a_printed_rate_that_the_clock_contradicts_is_told(tmp_path: Path) -> None:
    assert "tokens per second per gpu: 9000 is printed, batch and step time give 2048" in told(
        read(tmp_path, titan(9000))
    )


def test_without_a_clock_the_rate_and_the_batch_give_the_step(tmp_path: Path) -> None:
    plain = re.sub(r"2025-03-01 12:\d\d:[\d.,]+ - ", "", titan(4096))
    reading = read(tmp_path, plain)
    assert step_of(reading)["median_s"] == 1.0
    assert "times of steps are of the printed rate and the batch" in told(reading)
    unknown = "".join(line + "\n" for line in plain.splitlines() if "Training starts" not in line)
    assert "no clock or batch gives it" in told(read(tmp_path, unknown))


def test_validation_of_torchtitan_is_no_step(tmp_path: Path) -> None:
    checks = TITAN.format(minute=3, second=1, step=80, tps=9).replace("step:", "validate step:")
    assert step_of(read(tmp_path, titan() + checks * 4)) == step_of(read(tmp_path, titan()))


def test_deepspeeds_timer_gives_samples_memory_and_steps_by_the_clock(tmp_path: Path) -> None:
    line = (
        "[2025-03-01 12:00:{second:02d},500] [INFO] [timer.py:264:stop] epoch=0/micro_step={micro}/global_step={step}, "
        "RunningAvgSamplesPerSec=30.0, CurrSamplesPerSec=32.0, MemAllocated=10.00GB, MaxMemAllocated=20.00GB\n"
    )
    text = "  train_batch_size ............. 64\n  train_micro_batch_size_per_gpu  4\n" + "".join(
        line.format(second=2 * step, micro=4 * step, step=step) for step in range(1, 12)
    )
    reading = read(tmp_path, text)
    assert step_of(reading)["median_s"] == 2.0
    assert reading.fragment["memory"] == {"allocated_bytes": 10 * 2**30, "max_allocated_bytes": 20 * 2**30}
    assert reading.fragment["printed_samples_per_s"] == 32.0
    assert reading.fragment["samples_per_s"] == 32.0
    assert reading.fragment["configuration"] == {"global_batch": 64, "microbatch": 4}
    older = "".join(f"[INFO] [timer.py:154:stop] 0/{step}, SamplesPerSec=32.0\n" for step in range(10, 60, 10))
    by_rate = read(tmp_path, "  train_batch_size ............. 64\n" + older)
    assert step_of(by_rate)["median_s"] == 2.0


def test_the_pipelines_samples_give_the_batch(tmp_path: Path) -> None:
    lines = "".join(f"steps: {n} loss: 7.1 iter time (s): 2.000 samples/sec: 32.000\n" for n in range(2, 9))
    assert read(tmp_path, lines).fragment["configuration"] == {"global_batch": 64}


def test_ms_swift_and_llama_factory_count_their_steps(tmp_path: Path) -> None:
    swift = (
        "{{'loss': 1.2, 'grad_norm': 1.0, 'learning_rate': 1e-05, 'memory(GiB)': 61.5, 'train_speed(iter/s)': 0.25, "
        "'epoch': 0.1, 'global_step/max_steps': '{}/100', 'elapsed_time': '1m 2s'}}\n"
    )
    reading = read(tmp_path, "".join(swift.format(step) for step in range(5, 50, 5)))
    assert step_of(reading)["median_s"] == 4.0
    megatron = swift.replace("'train_speed(iter/s)': 0.25", "'train_speed(s/it)': 4.0").replace(
        "global_step/max_steps", "iteration"
    )
    assert step_of(read(tmp_path, "".join(megatron.format(step) for step in range(5, 50, 5))))["median_s"] == 4.0
    assert reading.fragment["memory"] == {"max_reserved_bytes": int(61.5 * 2**30)}
    factory = '{{"current_steps": {}, "total_steps": 90, "loss": 1.2, "lr": 1e-5, "elapsed_time": "0:0{}:{:02d}"}}\n'
    lines = "".join(factory.format(10 * n, n // 2, 30 * (n % 2)) for n in range(1, 9))
    assert step_of(read(tmp_path, lines, "trainer_log.jsonl"))["median_s"] == 3.0


def test_a_clock_beside_iterations_gives_their_time_where_no_line_says_it(tmp_path: Path) -> None:
    line = " [{}] iteration {:8d}/ 500 | consumed samples: 12 | global batch size: 128 | lm loss: 2.0E+00 |{}\n"
    for clock in ("2024-03-30 20:{:02d}:{:02d}", "2024/03/30 20:{:02d}:{:02d}", "03/30/2024 20:{:02d}:{:02d}"):
        at = [clock.format(n // 6, 10 * (n % 6)) for n in range(12)]
        lines = [line.format(when, 5 * n, "") for n, when in enumerate(at, 1)]
        reading = read(tmp_path, "".join(lines))
        assert (step_of(reading)["median_s"], step_of(reading)["steps"]) == (2.0, 11), clock
        assert "times of steps are of the clock between lines" in told(reading)
    timed = " elapsed time per iteration (ms): 1500.0 |"
    cut = "".join(line.format(when, 5 * n, timed if n != 4 else "") for n, when in enumerate(at, 1))
    assert step_of(read(tmp_path, cut))["median_s"] == 1.5
    assert "1 line of iterations are cut" in told(read(tmp_path, cut))


@pytest.mark.parametrize(("steps", "apart", "decimals"), [(200, 10, 2), (200, 10, 4), (4000, 10, 2)])
def test_epochs_count_the_steps_of_lines_with_a_clock(tmp_path: Path, steps: int, apart: int, decimals: int) -> None:
    """Two epochs, a line each `apart` steps of 3 s; epochs that are rounded to more than a step count far apart."""
    header = HEADER.replace("Num Epochs = 1", "Num Epochs = 2").replace("steps = 60", f"steps = {steps}")
    line = "2025-05-01T{:02d}:{:02d}:{:02d}.500000000Z {{'loss': 1.2, 'learning_rate': 1e-05, 'epoch': {:.{}f}}}\n"
    at = [(3 * n, n / (steps / 2)) for n in range(apart, steps + 1, apart)]
    lines = [line.format(12 + s // 3600, s // 60 % 60, s % 60, epoch, decimals) for s, epoch in at]
    reading = read(tmp_path, header + "".join(lines))
    assert step_of(reading)["median_s"] == pytest.approx(3.0, rel=0.05)
    assert "the clock between lines, whose epochs count the steps" in told(reading)
    without = header.replace("  Num Epochs = 2\n", "")
    with pytest.raises(InputError, match="not the log of a training"):
        read(tmp_path, without.replace("batch size", "size") + "".join(lines))


def test_a_checkpoint_between_lines_of_a_coarse_clock_is_named(tmp_path: Path) -> None:
    line = " [2024-03-30 20:{:02d}:{:02d}] iteration {:8d}/ 500 | global batch size: 128 | lm loss: 2.0E+00 |\n"
    at = [4 * n + (50 if n > 9 else 0) for n in range(20)]
    lines = [line.format(s // 60, s % 60, n) for n, s in enumerate(at, 1)]
    lines.insert(10, "saving checkpoint at iteration 10 to /ckpt\n")
    reading = read(tmp_path, "".join(lines))
    assert step_of(reading)["median_s"] == 4.0
    assert "behind a checkpoint" in told(reading)


def test_ms_swift_without_a_speed_has_a_clock(tmp_path: Path) -> None:
    line = "{{'loss': 1.2, 'epoch': 0.1, 'global_step/max_steps': '{}/100', 'elapsed_time': '{}'}}\n"
    clocks = ("40s", "1m 20s", "2m 0s", "2m 40s", "3m 20s")
    reading = read(tmp_path, "".join(line.format(10 * n, clock) for n, clock in enumerate(clocks, 1)))
    assert step_of(reading)["median_s"] == 4.0


def test_automodels_lines_have_a_clock_of_whole_seconds(tmp_path: Path) -> None:
    line = (
        "2025-08-01 10:{:02d}:{:02d} | INFO | root | step {} | epoch 0 | loss 2.4387 | grad_norm 5.0312 | "
        "lr 1.00e-05 | mem 23.50 GiB | tps 4527.75(2263.88/gpu) | num_label_tokens 2114\n"
    )
    reading = read(tmp_path, "".join(line.format(n // 3, 20 * (n % 3), n) for n in range(1, 12)))
    assert step_of(reading)["median_s"] == 20.0
    assert reading.fragment["memory"] == {"max_allocated_bytes": int(23.5 * 2**30)}
    assert reading.fragment["printed_tokens_per_s_per_gpu"] == 2263.88
    quick = "".join(line.format(0, 5 * n, n) for n in range(1, 12))
    assert step_of(read(tmp_path, quick))["median_s"] == 5.0
    assert step_of(read(tmp_path, quick))["steps"] == 5  # two steps each: 5 s of a clock of whole seconds are +- 20 %
    once = "".join(line.format(0, 3 * n, n) for n in range(1, 4))
    assert "step" not in read(tmp_path, once).fragment


def test_the_state_of_the_trainer_is_a_log_and_no_settings_of_deepspeed(tmp_path: Path) -> None:
    history: list[dict[str, float]] = [{"epoch": n / 100, "loss": 2.0, "step": n} for n in range(10, 100, 10)]
    history.append({"epoch": 1.0, "step": 100, "train_runtime": 1000.0, "train_samples_per_second": 6.4})
    state = {"epoch": 1.0, "global_step": 100, "log_history": history, "max_steps": 100, "train_batch_size": 2}
    reading = read(tmp_path, json.dumps(state, indent=2), "trainer_state.json")
    assert (reading.kind, step_of(reading)["median_s"]) == ("training-log", 10.0)
    with pytest.raises(InputError, match="4 of 5 keys are none of DeepSpeed"):
        read_files(["deepspeed", str(tmp_path / "trainer_state.json")])


def test_lightnings_bar_goes_on_over_epochs(tmp_path: Path) -> None:
    text = "\r".join(
        bar(step, 50, "0.50it/s, v_num=0, train_loss=2.3", f"Epoch {epoch}: ")
        for epoch in (0, 1)
        for step in range(1, 51)
    )
    checks = "\r".join(bar(step, 20, "9.0it/s", "Validation DataLoader 0: ") for step in range(1, 21))
    for description in ("Train: ", "Steps: ", "Epoch 1/3: "):
        own = "\r".join(bar(step, 50, "0.50it/s", description) for step in range(1, 51))
        assert step_of(read(tmp_path, f"{HEADER}{own}\n{checks}\n"))["median_s"] == 2.0
    reading = read(tmp_path, f"{text}\n{checks}\n")
    assert (step_of(reading)["median_s"], step_of(reading)["last_step"]) == (2.0, 100)


@pytest.mark.parametrize("text", [HEADER + bars() + "\n" + END + "\n", titan()])
def test_windows_line_ends_colours_and_labels_change_nothing(tmp_path: Path, text: str) -> None:
    plain = read(tmp_path, text).fragment
    lines = text.split("\n")
    tagged = [
        "\n".join("\r".join(f"{tag}{state}" for state in line.split("\r")) for line in lines)
        for tag in ("[rank0]: ", "node-1: ", "[1,0]<stdout>:", "0: ")
    ]
    for changed in ("\r\n".join(lines), "\n".join(f"\x1b[36m{line}\x1b[0m" for line in lines), *tagged):
        (tmp_path / "train.log").write_bytes(changed.encode())
        assert read_files([str(tmp_path / "train.log")]).fragment == plain


def test_a_log_that_begins_with_much_else_is_known_too(tmp_path: Path) -> None:
    before = "".join(
        f"[WARNING] 2025-03-01 token {i} of the tokenizer is not in the vocabulary\n" for i in range(4_000)
    )
    assert len(before) > 200_000
    assert step_of(read(tmp_path, before + titan()))["median_s"] == 2.0


def test_what_the_documents_list_is_what_there_is() -> None:
    root = Path(__file__).parents[2]
    formats, exports = ((root / "docs" / name).read_text() for name in ("formats.md", "exports.md"))
    assert [kind for kind in KINDS if f"`{kind}`" not in formats] == []
    assert [target for target in TARGETS if f"`{target}`" not in exports] == []


FACTORY = '{"current_steps": %d, "total_steps": 100, "%s": 1.0, "epoch": 0.1, "elapsed_time": "0:%02d:%02d"}'


def test_evaluations_of_llama_factory_are_no_steps(tmp_path: Path) -> None:
    clock = [
        (10, "loss", 1, 40),
        (20, "loss", 3, 20),
        (25, "eval_loss", 5, 20),
        (30, "loss", 7, 0),
        (40, "loss", 8, 40),
    ]
    reading = read(tmp_path, "\n".join(FACTORY % line for line in clock))
    assert (step_of(reading)["median_s"], step_of(reading)["steps"], step_of(reading)["outliers"]) == (10.0, 2, 1)
    assert "step 30 took 22 s, behind an evaluation" in told(reading)
    assert "a line stands for 10 steps" in told(reading)


@pytest.mark.parametrize(("samples", "steps", "batch"), [(51.2, 0.8, 64), (12.8, 0.01, None), (1.0, 0.0001, None)])
def test_the_trainers_two_rates_give_the_batch_where_they_leave_one_number(
    samples: float, steps: float, batch: int | None, tmp_path: Path
) -> None:
    rates = f"'train_samples_per_second': {samples}, 'train_steps_per_second': {steps}"
    reading = read(tmp_path, f"{{'train_runtime': 1000.0, {rates}, 'train_loss': 1.0}}\n")
    configuration = reading.fragment["configuration"]
    assert isinstance(configuration, dict) and configuration.get("global_batch") == batch
