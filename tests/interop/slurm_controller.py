"""A Slurm controller with made-up nodes, to which jobs are shown with `sbatch --test-only`: no node daemon, no munge.

Nodes in state CLOUD count as available although none is there.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONFIG = """ClusterName=test
SlurmctldHost={host}
SlurmctldPort={port}
SlurmdPort={other}
AuthType=auth/none
CryptoType=crypto/none
SlurmUser={user}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
GresTypes=gpu
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=60
NodeName=h[001-064] CPUs=96 Sockets=2 CoresPerSocket=48 RealMemory=1000000 Gres=gpu:h100:8 State=CLOUD
NodeName=a[001-016] CPUs=64 Sockets=2 CoresPerSocket=32 RealMemory=500000 Gres=gpu:a100:8 State=CLOUD
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no controller here; empty where there can."""
    return "" if shutil.which("slurmctld") and shutil.which("sbatch") else "left out: Slurm's controller is not here"


@contextmanager
def controller(folder: Path) -> Iterator[Path]:
    """A running controller; its configuration file."""
    (folder / "state").mkdir()
    config = folder / "slurm.conf"
    ports = [_free_port() for _ in range(2)]
    values = {"host": socket.gethostname(), "port": ports[0], "other": ports[1], "folder": folder}
    config.write_text(CONFIG.format(user=_user(), **values))
    process = subprocess.Popen(
        ["slurmctld", "-D", "-i", "-f", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(100):
            if _answers(config):
                break
            time.sleep(0.1)
        yield config
    finally:
        process.terminate()
        process.wait(20)


def shown_to_slurm(config: Path, script: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`sbatch --test-only`: exit code 0 where the controller could start the job, else what it says."""
    return subprocess.run(
        ["sbatch", "--test-only", *options, str(script)],
        env={**os.environ, "SLURM_CONF": str(config)},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def _answers(config: Path) -> bool:
    done = subprocess.run(
        ["scontrol", "ping"], env={**os.environ, "SLURM_CONF": str(config)}, capture_output=True, text=True, check=False
    )
    return "is UP" in done.stdout


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name
