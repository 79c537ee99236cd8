"""Jobs on an older release of transformers, whose modules have other names and whose experts are lists of modules."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.interop
ROOT = Path(__file__).parents[2]
OLDER = Path(sys.prefix) / "transformers"


FILES = [("test_ghost_plans.py", ""), ("test_ghost_execution.py", ""), ("test_loss_curves.py", "")]
if os.environ.get("MMPLAN_EVERY_PLAN"):  # a minute more
    FILES.append(("test_job_experts.py", "every_gradient"))


@pytest.mark.parametrize(("file", "chosen"), FILES)
def test_models_of_the_older_release_are_laid_out_and_run(file: str, chosen: str) -> None:
    pinned = re.search(r"^transformers==(\S+)$", (ROOT / "interop-transformers.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    environment = os.environ | {"PYTHONPATH": f"{OLDER}{os.pathsep}{ROOT}"}
    asked = [sys.executable, "-c", "import transformers; print(transformers.__version__)"]
    assert subprocess.run(asked, env=environment, capture_output=True, text=True).stdout.strip() == pinned[1]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/runtime/{file}", "-k", chosen]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
