"""Accelerate's own launcher turns the configuration of a plan into variables, and its own classes read these."""

import os
from pathlib import Path
from typing import Any

import pytest
from shaped_plans import flat_plan

from mmplan.errors import CheckError
from mmplan.planner.formats.accelerate import export_accelerate
from mmplan.planner.plan import Plan

pytestmark = pytest.mark.interop


def launched(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, str]]:
    """Arguments and variables of `accelerate launch` on this file; the variables are set, too."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    file = folder / "accelerate.yaml"
    file.write_text(text.replace("FIRST_MACHINE", "127.0.0.1").replace("29500", "0"))
    # The second machine need not have the meeting port free.
    words = ["--config_file", str(file), "--machine_rank", "1", "--main_process_port", "0", "train.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    variables = prepare_multi_gpu_env(arguments)
    for name in [name for name in os.environ if name.startswith(("FSDP_", "PARALLELISM_", "ACCELERATE_"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return arguments, variables


def require_equal(plan: Plan, arguments: Any, variables: dict[str, str]) -> None:
    """What Accelerate understood is the plan."""
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin

    assert arguments.num_processes == plan.rank_count
    assert variables["ACCELERATE_MIXED_PRECISION"] == {"fp32": "no", "bf16": "bf16"}[plan.scenario.precision]
    if plan.width > 1:
        degrees = ParallelismConfig()
        sizes = degrees.dp_replicate_size * degrees.dp_shard_size, degrees.tp_size, degrees.cp_size
        assert sizes == (plan.dp, plan.tp, plan.cp)
        assert degrees.total_size == plan.rank_count
        if plan.cp > 1:
            assert degrees.cp_handler.cp_comm_strategy == "alltoall"
        if arguments.use_fsdp:  # its own check, made when training starts
            assert degrees.dp_shard_enabled or degrees.cp_enabled
    if arguments.use_fsdp:
        plugin = FullyShardedDataParallelPlugin()
        assert plugin.fsdp_version == 2
        assert plugin.reshard_after_forward == (plan.sharding == "parameters")
        assert plugin.activation_checkpointing in (True, False)


def test_round_trips_of_random_plans(
    pytestconfig: pytest.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(pytestconfig.getoption("--round-trips")):
        plan = flat_plan(seed)
        try:
            made = export_accelerate(plan)
        except CheckError:
            assert plan.spread  # tp does not divide what Accelerate would have to split
            continue
        arguments, variables = launched(made.files["accelerate.yaml"], tmp_path, monkeypatch)
        require_equal(plan, arguments, variables)


@pytest.mark.parametrize(
    ("word", "wrong"), [("mixed_precision: bf16", "mixed_precision: bf61"), ("num_machines", "num_machine")]
)
def test_a_wrong_word_would_be_seen(word: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = next(plan for plan in map(flat_plan, range(20)) if plan.scenario.precision == "bf16" and not plan.spread)
    text = export_accelerate(plan).files["accelerate.yaml"]
    assert word in text
    with pytest.raises(ValueError, match=r"Unknown|unknown"):
        launched(text.replace(word, wrong), tmp_path, monkeypatch)
