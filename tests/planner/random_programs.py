"""Random small pipelines: any DAG of stages, several on a rank, with whole, split or no backward; and broken ones."""

import random
from dataclasses import replace

import numpy as np

from mmplan.planner.columns import program_of
from mmplan.planner.dry_run import schedule_columns
from mmplan.planner.place import Lowered, Pipeline, TiedSum, Transfer, place
from mmplan.planner.program import Program
from mmplan.planner.schedule import Compute, Schedule

SECONDS = (0.0, 0.5, 1.0, 1.0, 3.0)


def random_lowered(rng: random.Random) -> Lowered:
    """A sound program."""
    stages, m, dp = rng.randint(1, 6), rng.randint(1, 4), rng.choice((1, 1, 2, 3))
    owner = list(range(rng.randint(1, stages)))
    owner += [rng.choice(owner) for _ in range(stages - len(owner))]
    backward = [rng.choice(("", "B", "B", "IW")) for _ in range(stages)]
    edges = [(a, b) for b in range(stages) for a in range(b) if rng.random() < 0.5]
    twice = [edge for edge in edges if rng.random() < 0.2]  # two tensors on one link
    transfers = tuple(
        Transfer(
            source=a,
            target=b,
            activation=f"x{index}>{b}",
            gradient=f"x{index}<{b}" if backward[a] and backward[b] else "",
        )
        for index, (a, b) in enumerate(sorted([*edges, *twice]))
    )
    pipeline = Pipeline(
        schedule=schedule_columns(_random_schedule(rng, owner, backward, transfers, m), stages, m),
        ranks=tuple(tuple(row * dp + replica for row in range(max(owner) + 1)) for replica in range(dp)),
        transfers=transfers,
        seconds=tuple((rng.choice(SECONDS), rng.choice(SECONDS), rng.random(), rng.random()) for _ in range(stages)),
        reduce_bytes=tuple(rng.choice((0, 8)) for _ in range(stages)),
        ties=_random_ties(rng, owner),
    )
    shape = (rng.choice((1, dp)), m, len(transfers))
    sizes = np.array([rng.choice((0, 4, 4)) for _ in range(int(np.prod(shape)))], dtype=np.int64).reshape(shape)
    return place(pipeline, sizes)


def _random_ties(rng: random.Random, owner: list[int]) -> tuple[TiedSum, ...]:
    """Sometimes one or two matrices that several stages hold."""
    found = []
    for _ in range(rng.choice((0, 0, 1, 2)) if len(owner) > 1 else 0):
        stages = sorted(rng.sample(range(len(owner)), rng.randint(2, len(owner))))
        found.append(TiedSum(stages=tuple(stages), bytes=4 if len({owner[stage] for stage in stages}) > 1 else 0))
    return tuple(found)


def _random_schedule(
    rng: random.Random, owner: list[int], backward: list[str], transfers: tuple[Transfer, ...], m: int
) -> Schedule:
    """A random order of all computes that respects every need, dealt out to ranks."""
    waits: dict[Compute, set[Compute]] = {}
    for stage, kinds in enumerate(backward):
        for microbatch in range(m):
            previous = None
            for kind in "F" + kinds:
                compute = Compute(stage, kind, microbatch)  # type: ignore[arg-type]
                waits[compute] = set() if previous is None else {previous}
                previous = compute
    for transfer in transfers:
        for microbatch in range(m):
            source, target = transfer.source, transfer.target
            waits[Compute(target, "F", microbatch)].add(Compute(source, "F", microbatch))
            if transfer.gradient:
                into = Compute(source, backward[source][0], microbatch)  # type: ignore[arg-type]
                waits[into].add(Compute(target, backward[target][0], microbatch))  # type: ignore[arg-type]
    orders: list[list[Compute]] = [[] for _ in range(max(owner) + 1)]
    done: set[Compute] = set()
    while len(done) < len(waits):
        ready = [compute for compute, needs in waits.items() if compute not in done and needs <= done]
        chosen = rng.choice(ready)
        done.add(chosen)
        orders[owner[chosen.stage]].append(chosen)
    return tuple(map(tuple, orders))


def random_durations(rng: random.Random, program: Program) -> list[list[float]]:
    return [[rng.choice((*SECONDS, rng.random())) for _ in rank.actions] for rank in program.ranks]


def broken(rng: random.Random, program: Program) -> Program:
    """One or two changes to one rank's list; often, not always, one that cannot run."""
    ranks = list(program.ranks)
    for _ in range(rng.randint(1, 2)):
        row = rng.randrange(len(ranks))
        actions = list(ranks[row].actions)
        a, b = rng.randrange(len(actions)), rng.randrange(len(actions))
        change = rng.choice(("swap", "swap", "move", "move", "drop", "other"))
        if change == "swap":
            actions[a], actions[b] = actions[b], actions[a]
        elif change == "move":
            actions.insert(b, actions.pop(a))
        elif change == "drop" and len(actions) > 1:
            actions.pop(a)
        elif actions[a].microbatch >= 0:
            actions[a] = replace(actions[a], microbatch=rng.randrange(program.microbatches))
        ranks[row] = replace(ranks[row], actions=tuple(actions))
    return replace(program, ranks=tuple(ranks))


def random_program(rng: random.Random) -> tuple[Lowered, Program]:
    """A lowered program, and the same or a broken one as actions."""
    lowered = random_lowered(rng)
    program = program_of(lowered.columns)
    return lowered, broken(rng, program) if rng.random() < 0.5 else program
