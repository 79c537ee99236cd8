"""Pipelines of replicated stages: against every pipeline of tiny chains, and one derived by hand."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from mmplan.errors import InfeasibleError, NoPlanFoundError
from mmplan.planner.partition import segments
from mmplan.planner.partition.replicated import TOLERANCE, solve_replicated
from mmplan.planner.partition.replicated_problem import (
    LayerAtDegree,
    LayerOption,
    ReplicatedProblem,
    ReplicatedStage,
    seconds_per_sample,
)
from mmplan.planner.stopping import Deadline


def enough() -> Deadline:
    """A minute from now."""
    return Deadline(limit_s=60)


def layer(
    *options: tuple[float, float, float], parameter_bytes: float = 0.0, transfer_s: dict[int, float] | None = None
) -> LayerAtDegree:
    """Options as (seconds, in-flight bytes, fixed bytes)."""
    return LayerAtDegree(
        options=tuple(LayerOption(name="", time_s=t, in_flight_bytes=a, fixed_bytes=b) for t, a, b in options),
        parameter_bytes=parameter_bytes,
        transfer_s=transfer_s or {},
    )


def chain(*layers: LayerAtDegree, devices: int, capacity_bytes: float = 100.0, samples: int = 12) -> ReplicatedProblem:
    """Layers in a row, at tensor degree 1, over a link of a byte per second."""
    return ReplicatedProblem(
        layers=tuple({1: at_degree} for at_degree in layers),
        edges=tuple((i, i + 1) for i in range(len(layers) - 1)),
        devices=devices,
        capacity_bytes=capacity_bytes,
        link_bytes_per_s=1.0,
        samples=samples,
    )


def random_chain(seed: int) -> ReplicatedProblem:
    """Two to four layers, sometimes with a skip edge, at degrees 1 and 2, with one or two options each."""
    random = np.random.default_rng(seed)
    layers = int(random.integers(2, 5))
    edges = {(i, i + 1) for i in range(layers - 1)} | ({(0, layers - 1)} if random.random() < 0.4 else set())
    if layers > 3 and random.random() < 0.4:
        edges -= {(1, 2)}
    near = {v: [u for edge in edges for u in edge if v in edge and u != v] for v in range(layers)}

    def at_degree(v: int, t: int) -> LayerAtDegree:
        time_s, in_flight, fixed = random.uniform(1, 9) / t**0.8, random.integers(1, 9), random.integers(0, 6)
        options = [(time_s, float(in_flight), float(fixed))]
        if random.random() < 0.7:
            options.append((time_s * 1.3, 1.0, float(fixed + random.integers(0, in_flight + 1))))
        transfer_s = {u: float(random.uniform(0, 0.4)) for u in near[v]}
        return layer(*options, parameter_bytes=float(random.uniform(0, 2)), transfer_s=transfer_s)

    degrees = [(1, 2) if random.random() < 0.8 else (1,) for _ in range(layers)]
    return ReplicatedProblem(
        layers=tuple({t: at_degree(v, t) for t in degrees[v]} for v in range(layers)),
        edges=tuple(sorted(edges)),
        devices=int(random.integers(1, 6)),
        capacity_bytes=float(random.uniform(8, 60)),
        link_bytes_per_s=float(random.uniform(0.2, 5)),
        samples=int(random.choice([2, 3, 4, 12])),
    )


def every_pipeline(problem: ReplicatedProblem) -> Iterator[tuple[ReplicatedStage, ...]]:
    """All assignments of layers to stages, of degrees to stages and options to layers, allowed or not."""
    layers = range(len(problem.layers))
    for stage_of in itertools.product(layers, repeat=len(layers)):
        stages = range(max(stage_of) + 1)
        if set(stage_of) != set(stages) or len(stages) > problem.devices:
            continue
        held = [tuple(v for v in layers if stage_of[v] == stage) for stage in stages]
        widths = [[t for t in (1, 2) if all(t in problem.layers[v] for v in inside)] for inside in held]
        shapes = [list(itertools.product(width, range(1, problem.devices + 1))) for width in widths]
        for shape in itertools.product(*shapes):
            if sum(t * d for t, d in shape) > problem.devices:
                continue
            counts = [[len(problem.layers[v][shape[s][0]].options) for v in held[s]] for s in stages]
            choices = [list(itertools.product(*(range(count) for count in inside))) for inside in counts]
            for options in itertools.product(*choices):
                parts = zip(held, options, shape, strict=True)
                yield tuple(
                    ReplicatedStage(layers=inside, options=chosen, tensor_degree=t, data_degree=d)
                    for inside, chosen, (t, d) in parts
                )


def brute_force_s(problem: ReplicatedProblem) -> float | None:
    values = []
    for stages in every_pipeline(problem):
        try:
            values.append(seconds_per_sample(problem, stages))
        except ValueError:
            continue
    return min(values, default=None)


@pytest.mark.parametrize("seed", range(150))
def test_the_optimum_of_every_pipeline_is_reached(seed: int) -> None:
    problem = random_chain(seed)
    expected_s = brute_force_s(problem)
    if expected_s is None:
        with pytest.raises(InfeasibleError):
            solve_replicated(problem, enough())
        return
    result = solve_replicated(problem, enough())
    assert result.optimal
    assert result.objective_s == pytest.approx(expected_s, rel=2 * TOLERANCE)
    assert result.bound_s <= expected_s


def test_random_chains_are_of_every_kind() -> None:
    values = [brute_force_s(random_chain(seed)) for seed in range(60)]
    assert 0 < sum(value is None for value in values) < 30
    found = [solve_replicated(random_chain(seed), enough()).stages for seed, value in enumerate(values) if value]
    assert any(len(stages) > 1 for stages in found)
    assert any(stage.data_degree > 1 for stages in found for stage in stages)
    assert any(stage.tensor_degree > 1 for stages in found for stage in stages)
    assert any(option for stages in found for stage in stages for option in stage.options)


def test_in_flight_microbatches_make_the_first_stage_recompute() -> None:
    """Two layers of 2 s keep 4 bytes for each microbatch, 1 byte at 3 s if recomputed; one sample, so no replicas. On
    two devices of 6 bytes the first stage has two microbatches in flight, 8 bytes, and recomputes: 3 s. With 8 bytes
    each takes 2 s.
    """
    both = layer((2, 4, 0), (3, 1, 0))
    tight = solve_replicated(chain(both, both, devices=2, capacity_bytes=6, samples=1), enough())
    assert tight.objective_s == pytest.approx(3)
    assert [stage.options for stage in tight.stages] == [(1,), (0,)]
    assert solve_replicated(
        chain(both, both, devices=2, capacity_bytes=8, samples=1), enough()
    ).objective_s == pytest.approx(2)


def test_replicas_share_the_work_and_average_their_gradients() -> None:
    """One layer of 6 s on three devices, 9 bytes of parameters, 12 samples: 6 / 3 + 4 * 9 * (2 / 3) / 12 = 4 s."""
    result = solve_replicated(chain(layer((6, 0, 0), parameter_bytes=9), devices=3), enough())
    assert result.objective_s == pytest.approx(4)


def test_a_data_degree_divides_the_samples() -> None:
    """Three devices and 4 samples: two replicas, 6 / 2 = 3 s."""
    problem = chain(layer((6, 0, 0)), devices=3, samples=4)
    assert solve_replicated(problem, enough()).objective_s == pytest.approx(3)
    three = ReplicatedStage(layers=(0,), options=(0,), tensor_degree=1, data_degree=3)
    with pytest.raises(ValueError, match="does not divide 4 samples"):
        seconds_per_sample(problem, (three,))


def test_layers_without_time_are_placed_by_their_transfers() -> None:
    """Two layers of 60 bytes on devices of 100 must part, at 1 s for each side; one layer alone takes nothing."""
    parted = [layer((0, 0, 60), transfer_s={1 - v: 1.0}) for v in range(2)]
    result = solve_replicated(chain(*parted, devices=2), Deadline(limit_s=5))
    assert result.optimal
    assert result.objective_s == 1
    assert solve_replicated(chain(layer((0, 1, 0)), devices=2), enough()).objective_s == 0


def test_too_many_choices_of_recomputation_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MAX_FRONT", 7)
    unlike = [layer((1, 2**i, 0), (2, 0, 2**i / 3)) for i in range(3)]
    with pytest.raises(NoPlanFoundError, match="3 layers have more than 7 choices"):
        solve_replicated(chain(*unlike, devices=1), enough())
