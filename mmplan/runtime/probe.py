"""How long the transfers of a program take on their own, measured after a run on the same ranks and links.

A communication library tells neither end when a tensor was really on the wire, so the run itself cannot say. Here each
distinct (peer, bytes) is sent alone: forward with the payload, back with one byte; half a round trip of single bytes is
taken off. Ranks go through their transfers in program order, so disjoint pairs measure at the same time.
"""

import time

import torch
import torch.distributed as dist

from mmplan.planner.program import RankProgram
from mmplan.runtime.network import receive, send

REPEATS = 5  # the best counts: on shared cores a median holds 2 ms scheduler slices


def probe_transfers(
    program: RankProgram, device: torch.device, network: dist.ProcessGroup
) -> dict[tuple[int, int], float]:
    """Seconds of each distinct (target rank, bytes) that this rank sends; collective over all ranks of the program."""
    seconds: dict[tuple[int, int], float] = {}
    answered: set[tuple[int, int]] = set()
    for action in program.actions:
        key = (action.peer, action.bytes)
        if action.kind == "SEND" and key not in seconds:
            empty_s = min(_round_trip_s(action.peer, 1, device, network) for _ in range(REPEATS))
            full_s = min(_round_trip_s(action.peer, action.bytes, device, network) for _ in range(REPEATS))
            seconds[key] = max(0.0, full_s - empty_s / 2)
        elif action.kind == "RECV" and key not in answered:
            answered.add(key)
            for size in (1, action.bytes):
                for _ in range(REPEATS):
                    _answer(action.peer, size, device, network)
    return seconds


def _round_trip_s(peer: int, size: int, device: torch.device, network: dist.ProcessGroup) -> float:
    payload = torch.zeros(size, dtype=torch.uint8, device=device)
    _synchronize(device)
    started = time.perf_counter()
    send(payload, peer, network)
    receive(1, device, peer, network)
    _synchronize(device)
    return time.perf_counter() - started


def _answer(peer: int, size: int, device: torch.device, network: dist.ProcessGroup) -> None:
    payload = receive(size, device, peer, network)
    send(payload[:1], peer, network)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
