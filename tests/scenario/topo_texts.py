"""Matrices as `nvidia-smi topo -m` prints them, made for tests."""

from collections.abc import Callable, Sequence

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""

# A hybrid cube mesh of 8: two rings of four with double links, and links between equal places.
CUBE = {(0, 1): 1, (0, 2): 1, (0, 3): 2, (1, 2): 2, (1, 3): 1, (2, 3): 2, (0, 4): 2, (1, 5): 2, (2, 6): 1, (3, 7): 1}
CUBE |= {(i + 4, j + 4): count for (i, j), count in list(CUBE.items()) if j < 4}


def cube_link(i: int, j: int) -> str:
    count = CUBE.get((min(i, j), max(i, j)), 0)
    return f"NV{count}" if count else "SYS"


def matrix_text(
    gpus: int,
    link: Callable[[int, int], str],
    nics: Sequence[Sequence[str]] = (),
    *,
    between: str = "\t",
    legend: str = LEGEND,
    nic_link: str = "SYS",
) -> str:
    """`link(i, j)` of GPUs, `nics[k][i]` of NIC k and GPU i; NICs see each other as `nic_link`."""
    names = [f"GPU{i}" for i in range(gpus)] + [f"NIC{k}" for k in range(len(nics))]

    def cell(i: int, j: int) -> str:
        if i == j:
            return " X "
        low, high = min(i, j), max(i, j)
        if high < gpus:
            return link(i, j)
        return nics[high - gpus][low] if low < gpus else nic_link

    lines = [between.join(["", *names, "CPU Affinity", "NUMA Affinity"])]
    for i, name in enumerate(names):
        affinity = [f"{16 * i}-{16 * i + 15}", str(i * 2 // max(gpus, 1))] if i < gpus else []
        lines.append(between.join([name, *(cell(i, j) for j in range(len(names))), *affinity]))
    return "\n".join(lines) + "\n" + legend
