"""What an exported launch script would start: its own bash, with a torchrun that only notes its arguments."""

import os
import subprocess
from pathlib import Path

NOTES = '#!/bin/bash\nprintf "%s\\0" "CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS-unset}" "$@" > "$NOTED"\n'


def started(script: str, folder: Path, node_rank: int = 0) -> list[str]:
    """CONNECTIONS=..., then the words behind torchrun, as bash hands them on."""
    torchrun = folder / "torchrun"
    torchrun.write_text(NOTES)
    torchrun.chmod(0o755)
    noted = folder / "noted"
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "NOTED": str(noted), "NODE_RANK": str(node_rank)}
    environment["ENTRY"] = "train.py"
    run = subprocess.run(["bash"], input=script, text=True, env=environment, capture_output=True, check=False)
    assert run.returncode == 0 and not run.stderr, run.stderr
    return noted.read_text().split("\0")[:-1]


def words_of(script: str, folder: Path) -> tuple[list[str], str]:
    """The words behind the entry script, and CUDA_DEVICE_MAX_CONNECTIONS."""
    connections, *words = started(script, folder)
    entry = next(place for place, word in enumerate(words) if word.endswith(".py"))
    return words[entry + 1 :], connections.partition("=")[2]
