"""Synthetic multimodal pipelines with uneven stages on eight ranks, in units of a tenth of a language-model stage.

Unless said, forward = input gradient, weight gradient = 0.7 forward, a hop takes 0.5, an activation takes memory 2, of
which the input gradient frees 1. The memory limit is what 1F1B needs. Case e assumes that an encoder's activation takes
1.5.
"""

from collections.abc import Callable, Sequence

import numpy as np

from mmplan.planner.schedules.problem import Role, ScheduleProblem, StageEdge, StageWork

HOP, WEIGHT = 0.5, 0.7
RANKS = 8


def stage(
    rank: int,
    forward: float | Sequence[float],
    m: int,
    *,
    backward: bool = True,
    weight: bool = True,
    held: float = 2.0,
    role: Role = "backbone",
    skipped: frozenset[int] = frozenset(),
) -> StageWork:
    seconds = tuple(forward) if isinstance(forward, Sequence) else (forward,) * m
    return StageWork(
        rank=rank,
        forward_s=seconds,
        input_s=seconds if backward else (),
        weight_s=tuple(WEIGHT * f for f in seconds) if backward and weight else (),
        held=(held,) * m,
        role=role,
        skipped=skipped,
    )


def linked(stages: Sequence[StageWork], pairs: Sequence[tuple[int, int]], m: int, capacity: float) -> ScheduleProblem:
    def lag(source: int, target: int) -> float:
        return 0.0 if stages[source].rank == stages[target].rank else HOP

    edges = tuple(
        StageEdge(source=a, target=b, forward_s=lag(a, b), backward_s=lag(a, b), carries_grad=stages[a].has_backward)
        for a, b in pairs
    )
    return ScheduleProblem(stages=tuple(stages), edges=edges, microbatches=m, capacity=(capacity,) * RANKS)


def chain(forwards: Sequence[float | Sequence[float]], m: int, capacity: float) -> ScheduleProblem:
    stages = [stage(rank, forward, m) for rank, forward in enumerate(forwards)]
    return linked(stages, [(s, s + 1) for s in range(len(stages) - 1)], m, capacity)


def unequal_chain(m: int) -> ScheduleProblem:
    return chain([14, 14, 10, 10, 10, 10, 10, 13], m, 16)


def two_encoders(m: int) -> ScheduleProblem:
    stages = [stage(0, 9, m, role="encoder"), stage(1, 6, m, role="encoder")]
    stages += [stage(rank, 10, m) for rank in range(2, 8)]
    return linked(stages, [(0, 2), *((s, s + 1) for s in range(1, 7))], m, 14)


def frozen_encoder(m: int) -> ScheduleProblem:
    stages = [stage(0, 24, m, backward=False, role="encoder"), *(stage(rank, 10, m) for rank in range(1, 8))]
    return linked(stages, [(s, s + 1) for s in range(7)], m, 14)


def frozen_backbone(m: int) -> ScheduleProblem:
    stages = [stage(rank, 7.5, m, role="encoder") for rank in range(2)]
    stages += [stage(rank, 10, m, weight=False) for rank in range(2, 8)]
    return linked(stages, [(s, s + 1) for s in range(7)], m, 16)


def replicated_encoder(m: int) -> ScheduleProblem:
    """The encoder of microbatch k runs on rank k mod 8, beside the language model, and holds 1.5."""
    others = [frozenset(k for k in range(m) if k % RANKS != rank) for rank in range(RANKS)]
    stages = [stage(rank, 20, m, held=1.5, role="encoder", skipped=others[rank]) for rank in range(RANKS)]
    stages += [stage(rank, 10, m) for rank in range(RANKS)]
    pairs = [(rank, RANKS) for rank in range(RANKS)] + [(s, s + 1) for s in range(RANKS, 2 * RANKS - 1)]
    return linked(stages, pairs, m, 19)


def image_counts(m: int) -> ScheduleProblem:
    """The vision stages take 3.5 per image, 0 to 8 images in a microbatch, all equally likely."""
    images = np.random.default_rng(0).integers(0, 9, m)
    vision = [3.5 * float(count) for count in images]
    return chain([vision, vision, 10, 10, 10, 10, 10, 13], m, 16)


def sharded_encoder(m: int) -> ScheduleProblem:
    """Every rank runs an eighth of every encoder, beside the language model."""
    stages = [stage(rank, 2.5, m, held=0.25, role="encoder") for rank in range(RANKS)]
    stages += [stage(rank, 10, m) for rank in range(RANKS)]
    pairs = [(rank, RANKS) for rank in range(RANKS)] + [(s, s + 1) for s in range(RANKS, 2 * RANKS - 1)]
    return linked(stages, pairs, m, 19)


CASES: dict[str, Callable[[int], ScheduleProblem]] = {
    "a": unequal_chain,
    "b": two_encoders,
    "c": frozen_encoder,
    "d": frozen_backbone,
    "e": replicated_encoder,
    "f": image_counts,
    "g": sharded_encoder,
}
