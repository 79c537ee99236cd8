"""`--pipeline-model-parallel-layout`: E the token table, t a block, L the head with the loss, | between stages.

Megatron lays the pieces round the pipeline ranks: piece i on rank i modulo pp, as plans with several stages per rank
do (megatron/core/transformer/pipeline_parallel_layer_layout.py, release 0.19).
"""

import re
from collections.abc import Sequence

from mmplan.planner.formats.language_chain import LanguageStage


def layout_text(stages: Sequence[LanguageStage]) -> str:
    """The pieces as Megatron reads them.

    >>> layout_text([LanguageStage(embedding=True, blocks=(0, 1), head=False, others=()),
    ...              LanguageStage(embedding=False, blocks=(2,), head=True, others=())])
    'Et*2|tL'
    """
    return "|".join("E" * stage.embedding + _run(len(stage.blocks)) + "L" * stage.head for stage in stages)


def _run(blocks: int) -> str:
    return "t" * blocks if blocks < 2 else f"t*{blocks}"


def layout_stages(text: str) -> tuple[LanguageStage, ...]:
    """The inverse of `layout_text`; also reads groups `(tt|)*3` and commas, as Megatron does.

    Raises:
        ValueError: a letter that is none of E, t, L, m.
    """
    text = text.replace(",", "")
    text = re.sub(r"\(([^)]+)\)\*(\d+)", lambda match: match[1] * int(match[2]), text)
    text = re.sub(r"(.)\*(\d+)", lambda match: match[1] * int(match[2]), text)
    stages, first = [], 0
    for piece in text.split("|"):
        if set(piece) - set("EtLm"):
            raise ValueError(f"pipeline layout: expected E, t, m, L, found {piece}")
        last = first + piece.count("t")
        blocks = tuple(range(first, last))
        stages.append(LanguageStage(embedding="E" in piece, blocks=blocks, head="L" in piece, others=()))
        first = last
    return tuple(stages)
