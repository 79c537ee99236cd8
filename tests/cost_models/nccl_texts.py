"""Logs as nccl-tests prints them, made for tests: every layout of columns, of any collective."""

from collections.abc import Callable, Sequence

from mmplan.cost_models.formats.nccl_collective import factor_of

SIZES = tuple(8 * 2**k for k in range(0, 31, 2))


def device_lines(hosts: Sequence[str], per_host: int, name: str) -> list[str]:
    lines = ["# Using devices"]
    for rank in range(len(hosts) * per_host):
        host, device = hosts[rank // per_host], rank % per_host
        lines.append(
            f"#  Rank {rank:2d} Group  0 Pid {900 + rank} on {host:>9} device {device:2d} [0x{16 + device:02x}] {name}"
        )
    return lines


def log_text(
    collective: str,
    ranks: int,
    time_s: Callable[[int], float],
    *,
    sizes: Sequence[int] = SIZES,
    layout: str = "new",
    devices: Sequence[str] = (),
    named: bool = False,
    prefix: str = "",
    extra: Sequence[str] = ("# Out of bounds values : 0 OK",),
) -> str:
    """`layout`: new (#wrong), old (error, no root), digits (%.2f), short (the last column is missing)."""
    share = 1 if collective in ("all_reduce", "sendrecv", "broadcast", "reduce") else ranks
    redop = "sum" if collective in ("all_reduce", "reduce_scatter", "reduce") else "none"
    lines = [f"+ mpirun {collective}_perf -b 8 -e 8G"] if named else []
    lines += [
        "# nThread 1 nGpus 1 minBytes 8 maxBytes 8589934592 step: 4(factor) warmup iters: 5 iters: 20",
        "#",
        *devices,
    ]
    wrong = "error" if layout == "old" else "#wrong"
    words = (
        f"redop     time   algbw   busbw {wrong}"
        if layout == "old"
        else f"redop    root     time   algbw   busbw {wrong}"
    )
    lines.append(f"#       size         count      type   {words}     time   algbw   busbw {wrong}")
    for size in sizes:
        cells = f"{size:12d} {size // 4 // share:13d}     float"
        cells += f"  {redop:>6}" if layout != "old" or redop == "sum" else ""
        cells += "" if layout == "old" else "      -1"
        for place in range(2):
            seconds = time_s(size) * (1.0 if place == 0 else 1.001)
            us, algbw = seconds * 1e6, size / seconds / 1e9
            cells += f"  {us:.2f}" if layout == "digits" else f"  {_rounded(us)}"
            cells += f"  {algbw:.2f}  {algbw * factor_of(collective, ranks):.2f}"
            checked = not (collective == "alltoall" and place == 1)
            if layout != "short" or place == 0:
                cells += "  N/A" if not checked else "  1e-07" if layout == "old" else "    0"
        lines.append(cells)
    return "".join(f"{prefix}{line}\n" for line in (*lines, *extra))


def _rounded(us: float) -> str:
    """As getFloatStr does: seven characters."""
    return f"{us:.2f}" if us < 100 else f"{us:.1f}" if us < 10_000 else f"{us:.0f}"
