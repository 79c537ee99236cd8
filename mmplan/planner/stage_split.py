"""Equal pipeline cuts as launch scripts make them: so many blocks per chunk, ends attached to their blocks."""

from itertools import accumulate, pairwise

from mmplan.cost_models.layer import Layer
from mmplan.errors import CostModelError


def block_units(layers: tuple[Layer, ...]) -> tuple[tuple[int, ...], ...]:
    """Positions of layers in groups: what precedes the first block, one group per block, what follows the last block.

    Layers between blocks (projectors, token tables of a second module) go with the block after them.
    """
    blocks = [position for position, layer in enumerate(layers) if layer.kind in ("block", "cross_block")]
    if not blocks:
        return (tuple(range(len(layers))), ())
    starts = [blocks[0], *(before + 1 for before in blocks)]
    groups = [tuple(range(start, end)) for start, end in pairwise(starts)]
    return (tuple(range(blocks[0])), *groups, tuple(range(starts[-1], len(layers))))


def chunk_ends(blocks: int, chunks: int) -> tuple[int, ...]:
    """0 and the last group (of `block_units`, exclusive) of each chunk."""
    ends = [0, *accumulate(chunk_sizes(blocks, chunks))]
    return (0, *(end + 1 for end in ends[1:-1]), blocks + 2)


def chunk_sizes(blocks: int, chunks: int) -> tuple[int, ...]:
    """Blocks of each chunk in order.

    Equal where they divide; where two more (one more) would divide, embedding and head count as blocks (Zero Bubble,
    arXiv 2401.10241, appendix; Llama 3, 2407.21783, section 3.3.2: one block fewer at both ends); else the rest goes
    to the middle.

    Raises:
        CostModelError: more chunks than blocks, embedding and head.
    """
    if blocks + 2 < chunks:
        raise CostModelError(f"{chunks} pipeline chunks need as many blocks, the model has {blocks}")
    if blocks % chunks and chunks > 1:
        for ends in (2, 1):
            size = (blocks + ends) // chunks
            if (blocks + ends) % chunks == 0:
                first = size - 1 if ends == 2 else size
                return (first, *([size] * (chunks - 2)), size - 1)
    base, rest = divmod(blocks, chunks)
    start = (chunks - rest) // 2
    return tuple(base + (1 if start <= chunk < start + rest else 0) for chunk in range(chunks))
