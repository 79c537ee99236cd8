"""Layers of every stage when nobody searches: equal counts of blocks, encoders in front, the head at the end."""

from collections.abc import Sequence

from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layer import Layer
from mmplan.errors import InputError
from mmplan.planner.stage_split import chunk_sizes


def block_counts(blocks: int, pieces: int) -> tuple[int, ...]:
    """Blocks of each of `pieces` pieces: `chunk_sizes`, or, where every piece has one block at most, none for the last
    piece and then for the first, which hold the vocabulary layers.

    >>> block_counts(22, 24)[:2]
    (0, 1)

    Raises:
        InputError: more pieces than blocks and vocabulary layers.
    """
    if pieces <= blocks:
        return chunk_sizes(blocks, pieces)
    if pieces > blocks + 2:
        raise InputError(f"{pieces} pieces of a pipeline: the model has {blocks} blocks and 2 vocabulary layers")
    first = 0 if pieces == blocks + 2 else 1
    return (first, *([1] * (pieces - 2)), 0)


def even_chunks(graph: ComputationGraph, kinds: Sequence[str], pp: int, vp: int = 1) -> tuple[tuple[Layer, ...], ...]:
    """Layers of the pp * vp pieces in pipeline order; piece i runs on stage i % pp.

    Args:
        kinds: names of the modules that are cut (language models); all other modules lie in the first piece, as
            Megatron-LM and its derivatives place encoders and projectors.
    """
    layers = graph.layers()
    blocks = [layer for layer in layers if layer.module in kinds and layer.kind in ("block", "cross_block")]
    pieces = pp * vp
    counts = block_counts(len(blocks), pieces)
    piece_of: dict[str, int] = {}
    first = 0
    for piece, count in enumerate(counts):
        piece_of.update((layer.id, piece) for layer in blocks[first : first + count])
        first += count
    result: list[list[Layer]] = [[] for _ in range(pieces)]
    for layer in layers:
        result[_piece(layer, blocks, piece_of, pieces)].append(layer)
    return tuple(tuple(piece) for piece in result)


def _piece(layer: Layer, blocks: Sequence[Layer], piece_of: dict[str, int], pieces: int) -> int:
    """Vocabulary layers lie beside the first or last block of their module, those of the first and last language model
    at the ends of the pipeline."""
    own = [piece_of[block.id] for block in blocks if block.module == layer.module]
    if not own or layer.id in piece_of:
        return piece_of.get(layer.id, 0)
    if layer.kind in ("head", "loss"):
        return pieces - 1 if layer.module == blocks[-1].module else own[-1]
    return 0 if layer.module == blocks[0].module else own[0]
