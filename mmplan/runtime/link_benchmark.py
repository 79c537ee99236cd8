"""Seconds of messages and all-reduces between processes on this machine, by size.

The launcher starts torchrun; every process runs `main`. Rank 0 and rank 1 play ping-pong, then all ranks reduce. Each
time is half of a round trip with the payload both ways, or one all-reduce between barriers.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from mmplan.cost_models.calibration import Exchange, Timed
from mmplan.errors import RunError

_SIZES = tuple(2**power for power in range(10, 27, 2))  # 1 KiB to 64 MiB
_ROUNDS, _QUICK_ROUNDS = 6, 3
_REPEATS, _LONG_REPEATS, _LONG_BYTES = 20, 4, 2**22
_TIMEOUT_S = 120.0


def measure_links(processes: int, kind: str, *, quick: bool) -> tuple[Exchange, ...]:
    """Start the processes and read what rank 0 found.

    Raises:
        RunError: a process failed or took more than two minutes; with the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="mmplan-links-") as folder:
        out = Path(folder) / "links.json"
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        worker = ["-m", "mmplan.runtime.link_benchmark", "--out", str(out), "--device", kind]
        command = [sys.executable, *torchrun, "--nproc-per-node", str(processes), *worker]
        command += ["--quick"] if quick else []
        loopback = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **loopback}
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=environment,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise RunError(f"measuring links between {processes} processes took over {_TIMEOUT_S:.0f} s") from error
        if done.returncode != 0 or not out.exists():
            lines = [line.strip() for line in done.stderr.splitlines() if "Error" in line]
            raise RunError(f"measuring links between {processes} processes failed: {(lines or ['no message'])[0]}")
        rows = json.loads(out.read_text())
    return tuple(
        Exchange(
            collective=row["collective"],
            size=row["size"],
            ranks=processes,
            timed=Timed(seconds=row["seconds"], rounds=tuple(row["rounds"])),
        )
        for row in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="mmplan.runtime.link_benchmark", description="one process, under torchrun")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    own = device if device.type == "cuda" else None  # NCCL asks for it, or guesses by the rank
    dist.init_process_group(backend, timeout=timedelta(seconds=60), device_id=own)
    rows = _rows(device, _QUICK_ROUNDS if options.quick else _ROUNDS)
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(rows))
    dist.destroy_process_group()


def _rows(device: torch.device, rounds: int) -> list[dict[str, object]]:
    """Times of rank 0; other ranks answer."""
    kinds: tuple[tuple[bool, Callable[[torch.Tensor], None]], ...] = ((False, _ping_pong), (True, _reduce))
    times: dict[tuple[bool, int], list[list[float]]] = {(c, size): [] for c, _ in kinds for size in _SIZES}
    for _ in range(rounds):
        for collective, run in kinds:
            for size in _SIZES:
                payload = torch.zeros(size // 4, device=device)
                run(payload)  # connects, allocates
                repeats = _REPEATS if size < _LONG_BYTES else _LONG_REPEATS
                times[collective, size].append([_once(run, payload, device) for _ in range(repeats)])
    return [
        {
            "collective": collective,
            "size": size,
            "seconds": _tenth([value for values in each for value in values]) / (1 if collective else 2),
            "rounds": sorted(_tenth(values) / (1 if collective else 2) for values in each)[: (rounds + 1) // 2],
        }
        for (collective, size), each in times.items()
    ]


def _once(run: Callable[[torch.Tensor], None], payload: torch.Tensor, device: torch.device) -> float:
    dist.barrier()
    _synchronize(device)
    started_s = time.perf_counter()
    run(payload)
    _synchronize(device)
    return time.perf_counter() - started_s


def _ping_pong(payload: torch.Tensor) -> None:
    rank = dist.get_rank()
    if rank == 0:
        dist.send(payload, 1)
        dist.recv(payload, 1)
    elif rank == 1:
        dist.recv(payload, 0)
        dist.send(payload, 0)


def _reduce(payload: torch.Tensor) -> None:
    dist.all_reduce(payload)


def _tenth(values: list[float]) -> float:
    return sorted(values)[(len(values) - 1) // 10]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
