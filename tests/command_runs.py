"""Commands as a user runs them, in this process: Python and its packages take longer to start than most of them."""

import os
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import patch

from mmplan.cli import main


def mmplan(*arguments: str | Path | int, cwd: Path, **environment: str) -> CompletedProcess[str]:
    """What `python -m mmplan ...` in that folder prints and ends with; what no command may let out is raised."""
    command = ["mmplan", *map(str, arguments)]
    out, told, code = StringIO(), StringIO(), 0
    with chdir(cwd), redirect_stdout(out), redirect_stderr(told), patch.object(sys, "argv", command):
        try:
            with patch.dict(os.environ, environment):
                main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return CompletedProcess(command, code, out.getvalue(), told.getvalue())
