"""Launch files and logs that others published: each gives the reading that it implies, or the right refusal."""

from pathlib import Path

import pytest

from mmplan.commands.import_kinds import read_files
from mmplan.errors import InputError
from mmplan.planner.fit import fit
from mmplan.planner.fit_job import Question, job_of
from mmplan.report.formats import fragment_text

FILES = (Path(__file__).parents[2] / ".." / "shared" / "data" / "files").resolve()
FOLDERS = ("megatron_log", "launch_megatron", "deepspeed", "torchtitan", "frameworks")
ALL = sorted(path for folder in FOLDERS for path in (FILES / folder).glob("*"))
pytestmark = pytest.mark.skipif(not FILES.is_dir(), reason="the files of others are not beside the repository")

# Start of a file's name -> what its reading is: facts of the recipe, of the measurement, or a word of the refusal.
EXPECTED = {
    "launch_megatron/01": {"tp": 8, "microbatch": 1, "sharding": "optimizer"},
    "launch_megatron/02": {"tp": 8, "pp": 4},
    "launch_megatron/05": {"tp": 4, "recompute": "full"},
    "launch_megatron/08": "Mamba",
    "launch_megatron/09": {"tp": 8, "pp": 16, "microbatch": 1},
    "launch_megatron/10": {"tp": 2, "recompute": "full"},
    "launch_megatron/18": "no line sets these values",
    "launch_megatron/22": "preprocesses data",
    "launch_megatron/23": "global-batch-size $bs",
    "launch_megatron/24": "text generation",
    "launch_megatron/25": "no line sets these values",
    "launch_megatron/28": "no degrees",
    "launch_megatron/41": {"tp": 8, "cp": 8},
    "launch_megatron/42": {"tp": 8, "pp": 8},
    "deepspeed/04": {"sharding": "optimizer"},
    "deepspeed/06": {"sharding": "parameters"},
    "deepspeed/11": {"sharding": "gradients", "tp": 2},
    "torchtitan/02": {"tp": 8, "microbatch": 8, "sharding": "parameters", "recompute": "full"},
    "torchtitan/03": {"tp": 8, "pp": 4, "sharding": "gradients"},
    "torchtitan/08": {"tp": 8, "microbatch": 2},
    "torchtitan/11": {"ep": 8},
    "frameworks/08": {"tp": 4, "pp": 2, "microbatch": 1},
    "frameworks/10": {"tp": 8, "microbatch": 8},
    "frameworks/14": "retrieval",
    "frameworks/15": "speculative",
    "megatron_log/05": {"median_s": 137.0418},
    "megatron_log/08": {"median_s": 22.6154},
    "megatron_log/14": {"median_s": 243.39135},
    "megatron_log/17": {"median_s": 10.11765},
}


@pytest.mark.parametrize("path", ALL, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_file_is_read_or_refused_with_its_name(path: Path, tmp_path: Path) -> None:
    expected = EXPECTED.get(f"{path.parent.name}/{path.name[:2]}")
    try:
        read = read_files([str(path)])
    except InputError as error:
        assert error.file == path
        assert "\n" not in error.message
        assert expected is None or (isinstance(expected, str) and expected in error.message)
        return
    assert not isinstance(expected, str)
    recipe = dict(read.fragment.get("recipes", {}).get("present", {}))  # type: ignore[attr-defined]
    found = recipe or dict(read.fragment.get("step", {}))  # type: ignore[call-overload]
    assert {key: found[key] for key in expected or {}} == (expected or {})
    if read.document == "scenario":
        (tmp_path / "mine.yaml").write_text(fragment_text(read))
        assert fit(*job_of(Question(scenario=tmp_path / "mine.yaml")), suggest=False).step is not None
