"""`--pipeline-model-parallel-layout`: E the token table, t a block, L the head with the loss, | between stages.

Megatron lays the pieces round the pipeline ranks: piece i on rank i modulo pp, as plans with several stages per rank
do (megatron/core/transformer/pipeline_parallel_layer_layout.py, release 0.19).
"""

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
