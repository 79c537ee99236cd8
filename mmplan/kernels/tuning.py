"""How large the tiles of each operator are, by GPU, and the candidates that `benchmarks/kernels.py --tune` measures.

An entry under a compute capability has been measured there (benchmarks/kernels_tuned.csv). The entry under None serves
every other device: reasoned, compiled without spilled registers (benchmarks/kernels_compiled.csv), but not measured.
"""

from dataclasses import dataclass

import torch

Capability = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Of an operator bound by memory: elements that a program reads at once, and its warps."""

    elements: int
    warps: int = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductTile:
    """Of a matrix product: rows, columns and depth, warps, and loads in flight (pipeline stages)."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# Enough loads in flight to hide the latency of memory without many registers.
TILES: dict[str, dict[Capability | None, Tile]] = {
    "fp8": {None: Tile(elements=2048)},
    "masked_norm": {None: Tile(elements=1024)},
    "ragged": {None: Tile(elements=2048)},
    "segment_moments": {None: Tile(elements=2048)},
    "sign_pack": {None: Tile(elements=2048)},
    "top_k": {None: Tile(elements=2048)},
}
TILE_CANDIDATES = tuple(Tile(elements=n, warps=w) for n in (1024, 2048, 4096, 8192) for w in (4, 8) if n // w <= 1024)

# By bytes of an element, and whether images are among the operands. 128 x 128 x 64 in 16 bits is what triton's matrix
# tutorials begin with; offsets of pixels take registers, which a quarter of it leaves. In 32 bits less, for as much
# shared memory.
PRODUCT_TILES: dict[tuple[int, bool], dict[Capability | None, ProductTile]] = {
    (2, False): {None: ProductTile(m=128, n=128, k=64, warps=8, stages=3)},
    (2, True): {None: ProductTile(m=128, n=64, k=32, warps=8, stages=3)},
    (4, False): {None: ProductTile(m=64, n=64, k=32, warps=4, stages=3)},
    (4, True): {None: ProductTile(m=64, n=32, k=32, warps=4, stages=3)},
}
PRODUCT_CANDIDATES = tuple(
    ProductTile(m=m, n=n, k=k, warps=warps, stages=stages)
    for m, n, warps in ((64, 64, 4), (128, 64, 8), (64, 128, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8))
    for k in (32, 64)
    for stages in (3, 4)
)
_INTERPRETED = ProductTile(m=16, n=32, k=16, warps=4, stages=1)  # several tiles even of what tests can afford


def tile_of(operator: str, device: torch.device) -> Tile:
    """The tile measured on a device like this one, or the general one."""
    by_capability = TILES[operator]
    return by_capability.get(_capability(device), by_capability[None])


def product_tile(device: torch.device, element_bytes: int, patched: bool) -> ProductTile:
    if device.type != "cuda":
        return _INTERPRETED
    by_capability = PRODUCT_TILES[element_bytes, patched]
    return by_capability.get(_capability(device), by_capability[None])


def _capability(device: torch.device) -> Capability | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
