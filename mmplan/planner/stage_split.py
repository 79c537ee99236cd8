"""Equal pipeline cuts as launch scripts make them: so many blocks per chunk, ends attached to their blocks."""

from mmplan.cost_models.layer import Layer
from mmplan.errors import CostModelError


def block_units(layers: tuple[Layer, ...]) -> tuple[tuple[int, ...], ...]:
    """Positions of layers in groups of one block each: what precedes a block goes with it, the end with the last."""
    units: list[list[int]] = []
    waiting: list[int] = []
    for position, layer in enumerate(layers):
        if layer.kind in ("block", "cross_block"):
            units.append([*waiting, position])
            waiting = []
        elif layer.kind in ("head", "loss") and units:
            units[-1].append(position)
        else:
            waiting.append(position)
    if not units:
        return (tuple(waiting),)
    units[-1] += waiting
    return tuple(tuple(sorted(unit)) for unit in units)


def chunk_sizes(blocks: int, chunks: int) -> tuple[int, ...]:
    """Blocks of each chunk in order.

    Equal where they divide; where two more (one more) would divide, embedding and head count as blocks (Zero Bubble, arXiv
    2401.10241, appendix; Llama 3, 2407.21783, section 3.3.2: one block fewer at both ends); else the rest goes to the
    middle.

    Raises:
        CostModelError: fewer blocks than chunks.
    """
    if blocks < chunks:
        raise CostModelError(f"{chunks} pipeline chunks need as many blocks, the model has {blocks}")
    if blocks % chunks and chunks > 1:
        for ends in (2, 1):
            size = (blocks + ends) // chunks
            if (blocks + ends) % chunks == 0 and size > 1:
                first = size - 1 if ends == 2 else size
                return (first, *([size] * (chunks - 2)), size - 1)
    base, rest = divmod(blocks, chunks)
    start = (chunks - rest) // 2
    return tuple(base + (1 if start <= chunk < start + rest else 0) for chunk in range(chunks))
