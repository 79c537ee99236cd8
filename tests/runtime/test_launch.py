"""Whole runs through torchrun on this machine: training, rehearsal, refusals, an ended launcher."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_plans import FOUR_STAGES, TWO_STAGES, changed_module, hand_plan, tiny_scenario

from mmplan.errors import InputError
from mmplan.planner.plan import Plan, scenario_hash
from mmplan.runtime.launch import execute
from mmplan.runtime.measurement import load_run, save_run
from mmplan.runtime.requirements import process_count, why_not_executed
from mmplan.runtime.validate import validate
from mmplan.scenario.scenario import Moe


def two_stage_plan() -> Plan:
    return hand_plan(replace(tiny_scenario(), global_batch=4), TWO_STAGES)


@pytest.mark.distributed
def test_training_lowers_the_loss_and_sends_the_predicted_bytes(tmp_path: Path) -> None:
    plan = hand_plan(replace(tiny_scenario(), global_batch=8), TWO_STAGES, dp=2, schedule="gpipe")
    told: list[tuple[int, float]] = []

    def on_step(step: int, seconds: float, losses: Mapping[str, float]) -> None:
        told.append((step, losses["llm"]))

    run = execute(plan, steps=20, local=4, on_step=on_step)
    assert run is not None
    assert run.steps[-1].losses["llm"] < 0.3 * run.steps[0].losses["llm"]
    assert told == [(step.index, pytest.approx(step.losses["llm"])) for step in run.steps]
    assert run.recorded_step > 0
    validation = validate(plan, run)
    checked = {row.quantity for row in validation.rows if row.threshold == 0.0 and row.passed}
    assert checked == {"sent_bytes", "reduce_bytes", "steps_sent_bytes", "steps_reduce_bytes"}
    assert all(row.passed for row in validation.rows if row.quantity in ("sent_bytes", "reduce_bytes"))
    assert all(row.passed for row in validation.rows if row.quantity == "peak_memory_bytes")
    assert all(rank.reduce_bytes > 0 and rank.transfer_s > 0 for rank in run.ranks)
    save_run(run, tmp_path / "run.json")
    assert load_run(tmp_path / "run.json") == run


@pytest.mark.distributed
@pytest.mark.usefixtures("at_hand_once")
def test_rehearsal_takes_one_process_for_each_tensor_parallel_group_and_the_bytes_of_the_plan() -> None:
    plan = replace(two_stage_plan(), tp=2)
    run = execute(plan, steps=1, local=2, rehearse=True, unit_s=0.01)
    assert run is not None
    assert run.rehearsed and run.time_scale > 1
    validation = validate(plan, run)
    assert all(row.passed for row in validation.rows if row.quantity == "sent_bytes")


def interrupted() -> None:
    raise KeyboardInterrupt


def terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def terminal_closed() -> None:
    os.kill(os.getpid(), signal.SIGHUP)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("end", "error"), [(interrupted, KeyboardInterrupt), (terminated, SystemExit), (terminal_closed, SystemExit)]
)
def test_an_ended_launcher_leaves_no_process_behind(end: Callable[[], None], error: type[BaseException]) -> None:
    seen: list[int] = []
    others = set(worker_processes())  # such as the server that other tests fork their processes from
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests themselves run under nohup
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]

    def stop(step: int, seconds: float, losses: Mapping[str, float]) -> None:
        seen.extend(set(worker_processes()) - others)
        end()

    with pytest.raises(error):
        execute(two_stage_plan(), steps=1000, local=2, rehearse=True, unit_s=0.01, on_step=stop)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == handlers
    signal.signal(signal.SIGHUP, before)
    assert len(seen) == 3  # torchrun and its two workers
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in seen) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in seen if Path(f"/proc/{pid}").exists()]


def worker_processes() -> list[int]:
    """Processes of a run below this one, by their parent in /proc; other tests may have left helpers of their own."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, waiting = [], [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return [pid for pid in found if b"mmplan.runtime.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_wrong_number_of_processes_is_refused_with_the_arithmetic() -> None:
    tiny = tiny_scenario()
    nodes = tuple(replace(pool, nodes=2) for pool in tiny.cluster.pools)
    plan = hand_plan(replace(tiny, cluster=replace(tiny.cluster, pools=nodes)), FOUR_STAGES, dp=2)
    with pytest.raises(InputError, match=r"^3 local processes, the plan needs pp=4 x dp=2 x tp=1 = 8$"):
        execute(plan, steps=1, local=3)


@pytest.mark.distributed
@pytest.mark.usefixtures("at_hand_once")
def test_tensor_parallel_training_follows_one_process_and_sums_the_predicted_bytes() -> None:
    """Two ranks share every layer of two stages; losses are those of two ranks with whole layers."""
    whole = two_stage_plan()
    plan = replace(whole, tp=2)
    run, expected = execute(plan, steps=4, local=4), execute(whole, steps=4, local=2)
    assert run is not None and expected is not None
    for step, other in zip(run.steps, expected.steps, strict=True):
        assert step.losses["llm"] == pytest.approx(other.losses["llm"], rel=1e-4)
    assert [rank.rank for rank in run.ranks] == [0, 1]
    validation = validate(plan, run)
    checked = {row.quantity for row in validation.rows if row.threshold == 0.0 and row.passed}
    assert checked == {"sent_bytes", "reduce_bytes", "tensor_bytes", "steps_sent_bytes", "steps_tensor_bytes"}
    assert validation.passed
    assert all(rank.tensor_bytes > 0 and rank.transfer_s > 0 for rank in run.ranks)


def test_what_tensor_parallel_ranks_do_not_share_is_refused_with_the_constraint() -> None:
    plan = replace(two_stage_plan(), tp=2)
    assert (process_count(plan, rehearse=False), process_count(plan, rehearse=True)) == (4, 2)
    with pytest.raises(
        InputError, match="'vision' takes mean and variance over all heads and the plan splits them over tp=2"
    ):
        process_count(changed_module(plan, "vision", qk_norm_whole=True), rehearse=False)
    repeated = changed_module(plan, "llm", kv_heads=2, heads=4)
    assert process_count(replace(repeated, tp=4), rehearse=False) == 8
    with pytest.raises(InputError, match="'llm' has 2 key-value heads for tp=4, and this release repeats heads of"):
        process_count(replace(repeated, tp=4), rehearse=False, own_model=True)
    with pytest.raises(InputError, match="'llm' takes a norm over all 2 key heads, of which tp=4 lays each on 2 ranks"):
        process_count(replace(changed_module(repeated, "llm", qk_norm_whole=True), tp=4), rehearse=False)
    assert process_count(
        replace(changed_module(plan, "vision", qk_norm_whole=True), spread=("vision",)), rehearse=False
    )


def test_what_context_parallel_ranks_do_not_share_is_refused_with_the_constraint() -> None:
    plan = replace(two_stage_plan(), cp=2)
    assert (process_count(plan, rehearse=False), process_count(plan, rehearse=True)) == (4, 2)
    moe = Moe(experts=4, topk=2, expert_ffn=8, capacity_factor=1.5)
    with pytest.raises(InputError, match=r"cp=2, and 'llm' drops tokens beyond .* set `constraints.cp: \[1\]`"):
        process_count(changed_module(plan, "llm", moe=moe), rehearse=False)


def test_heads_that_do_not_divide_are_refused_where_rows_are_exchanged_for_them() -> None:
    plan = replace(two_stage_plan(), cp=4)
    technique = replace(plan.scenario.technique, context_parallel="all-to-all")
    by_heads = replace(plan, scenario=replace(plan.scenario, technique=technique))
    assert process_count(plan, rehearse=False) == process_count(by_heads, rehearse=False, own_model=True)
    with pytest.raises(InputError, match=r"llm: .* = 2 / \(tp 1 x cp 4\) = 0.5 is no whole number, .*: ring`, or"):
        process_count(by_heads, rehearse=False)
    assert "no whole number" in (why_not_executed(by_heads) or "")
    assert process_count(replace(by_heads, cp=2), rehearse=False) == 4


def test_a_plan_for_another_technique_is_refused_but_may_be_rehearsed() -> None:
    plan = two_stage_plan()
    technique = replace(plan.scenario.technique, attention="math")
    plan = replace(plan, scenario=replace(plan.scenario, technique=technique))
    with pytest.raises(InputError, match=r"made for technique.attention: math, and this release's runtime does flash2"):
        process_count(plan, rehearse=False)
    assert process_count(plan, rehearse=True) == 2


def test_a_run_has_at_least_one_step() -> None:
    with pytest.raises(InputError, match="at least 1 step, found 0"):
        execute(two_stage_plan(), steps=0, local=2)


def test_a_rehearsal_larger_than_the_machine_is_refused_before_it_starts() -> None:
    plan = two_stage_plan()
    llm = plan.scenario.model.module("llm")
    assert llm.vocabulary is not None
    huge = replace(llm, vocabulary=replace(llm.vocabulary, size=10**12))
    modules = tuple(huge if m.name == "llm" else m for m in plan.scenario.model.modules)
    scenario = replace(plan.scenario, model=replace(plan.scenario.model, modules=modules))
    with pytest.raises(InputError, match=r"real gradient buffers: .* TiB over 4 processes, this machine has "):
        huge_plan = replace(plan, scenario=scenario, scenario_hash=scenario_hash(scenario), dp=2, microbatches=2)
        execute(huge_plan, steps=1, local=4, rehearse=True)


def test_without_torchrun_and_without_local_the_message_says_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match=r"not started by torchrun: use --local 2, or torchrun --nproc-per-node 2"):
        execute(two_stage_plan(), steps=1, local=None)
