"""Shell scripts are read without being run: what stands in them literally is put in, the rest stays open."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmplan.errors import InputError
from mmplan.scenario.formats.launch.arguments import CommandLine, read_command_line
from mmplan.scenario.formats.launch.arithmetic import evaluated
from mmplan.scenario.formats.launch.shell import read_shell

SCRIPT = r"""#!/bin/bash
#SBATCH --nodes=4   # of 8
# trains a model
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-4}
WORLD=$(($GPUS_PER_NODE * NNODES))
SIZE=7B
if [ $SIZE = 7B ]; then
  LAYERS=32
elif [ $SIZE = 13B ]; then
  LAYERS=40
fi
if [ "$HOSTNAME" == there ]; then MICRO=1; else MICRO=2; fi
case $SIZE in
  1B) HIDDEN=2048 ;;
  7B|8B) HIDDEN=4096 ;;
  *) HIDDEN=1 ;;
esac
[ $WORLD -gt 8 ] && TP=8 || TP=1
LAUNCH=(
    --nproc_per_node $GPUS_PER_NODE   # one per GPU
    --nnodes "$NNODES"
)
MODEL_ARGS="
    --num-layers $LAYERS \
    --hidden-size=$HIDDEN
"
MODEL_ARGS+=" --bf16"
cat <<EOF
--num-layers 99
EOF
torchrun ${LAUNCH[@]} pretrain_gpt.py \
    ${MODEL_ARGS} \
    --micro-batch-size ${MICRO} \
    --lr -1e-5 --prompt '$HOME and # no comment' \
    --data-path 0.5 a 0.5 b 2>&1 | tee log.txt
"""


def command_line(text: str, tmp_path: Path, name: str = "run.sh") -> CommandLine:
    (tmp_path / name).write_text(text)
    return read_command_line(tmp_path / name)


def values(line: CommandLine) -> dict[str, tuple[str, ...]]:
    return {name: argument.values for name, argument in line.arguments.items()}


def test_what_a_script_sets_is_put_in_with_the_line_where_it_stands(tmp_path: Path) -> None:
    line = command_line(SCRIPT, tmp_path)
    found = values(line)
    assert (found["nproc_per_node"], found["nnodes"], found["nodes"]) == (("8",), ("4",), ("4",))
    assert (found["num_layers"], found["hidden_size"], found["bf16"]) == (("32",), ("4096",), ())
    assert (found["lr"], found["prompt"], found["data_path"]) == (
        ("-1e-5",),
        ("$HOME and # no comment",),
        ("0.5", "a", "0.5", "b"),
    )
    assert line.arguments["num_layers"].line == SCRIPT.splitlines().index(r"    --num-layers $LAYERS \ ".rstrip()) + 1
    assert line.variables["WORLD"] == "32"


def test_a_branch_whose_condition_is_not_known_leaves_its_variable_open(tmp_path: Path) -> None:
    assert values(command_line(SCRIPT, tmp_path))["micro_batch_size"] == ("${MICRO}",)


def test_the_command_inside_bash_c_is_read(tmp_path: Path) -> None:
    line = command_line('srun --nodes 2 bash -c "torchrun --nproc_per_node 4 train.py --num-layers 2"\n', tmp_path)
    assert (values(line)["num_layers"], values(line)["nproc_per_node"]) == (("2",), ("4",))


def test_the_last_of_repeated_arguments_counts_and_is_told(tmp_path: Path) -> None:
    line = command_line("--tp 2\n--tp 4\n--num-layers 2\n", tmp_path, "a.args")
    assert values(line)["tp"] == ("4",)
    assert any("--tp stands 2 times (lines 1 and 2): the last, 4, is taken" in warning for warning in line.warnings)


@pytest.mark.parametrize(
    ("head", "launcher"),
    [
        ("#SBATCH -N 4\n#SBATCH -n32\n", "srun"),
        ("#SBATCH -N4\n", "srun --label"),
        ("", "srun -N 4 --gpus-per-node=8 -n 32"),
        ("", "/usr/bin/srun -N4"),
    ],
)
def test_slurms_short_options_are_read(tmp_path: Path, head: str, launcher: str) -> None:
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{head}{launcher} python train.py --num-layers 2 -n 7\n")
    arguments = read_command_line(tmp_path / "job.sh").arguments
    assert (arguments["nodes"].values, arguments["n"].values) == (("4",), ("7",))
    assert arguments.get("ntasks") is None or arguments["ntasks"].values == ("32",)


def test_a_blank_behind_a_backslash_is_told(tmp_path: Path) -> None:
    line = command_line("python train.py --num-layers 2 \\ \n  --bf16\n", tmp_path)
    assert "bf16" in line.arguments
    assert any("blank behind its backslash" in warning for warning in line.warnings)


def test_a_script_without_a_training_command_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no training command"):
        command_line("#!/bin/bash\nls --all --size\necho done\n", tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [("2*(3+4)", 14), ("$A / 2", 4), ("A % 3", 2), ("-A", -8), ("1/0", None), ("B+1", None), ("2**3", None)],
)
def test_arithmetic_of_known_numbers(text: str, value: int | None) -> None:
    assert evaluated(text, {"A": "8"}) == value


@pytest.mark.parametrize(
    "bomb",
    [
        "A=xxxxxxxxxx\n" + "A=$A$A\n" * 40 + "python train.py --num-layers $A\n",
        "$(" * 20_000 + "\n",
        "if [ a = b ]\n" * 5000,
        "A=(" * 20_000,
        "${A:-" * 20_000,
        "`" * 20_001,
        "".join(f"V{i}=1\nif [ $X = 1 ]; then V{i}=2; fi\n" for i in range(6000)),
    ],
)
def test_hostile_scripts_end_with_a_sentence_or_a_reading(bomb: str) -> None:
    try:
        read_shell(bomb, Path("bomb.sh"))
    except InputError as error:
        assert error.file is not None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([*SCRIPT.split(" "), "$(", "${", "(", ")", "'", '"', "`", "fi\n", ";;", "<<EOF\n", "\\"]))
)
def test_no_mix_of_shell_words_breaks_the_reader(words: list[str]) -> None:
    read_shell(" ".join(words), Path("mixed.sh"))
