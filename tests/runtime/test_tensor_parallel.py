"""Layers split over two processes against whole ones: losses, every gradient, summed bytes, kept bytes."""

import pytest
from case_processes import run_on_ranks
from split_cases import BLIND, PROCESSES, SAMPLES, SplitResult, run_split_cases, split_cases

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.exposed_time import reduced_backward_elements, reduced_forward_elements
from mmplan.cost_models.layer import Layer, splits_rows
from mmplan.cost_models.loads import sample_loads
from mmplan.cost_models.local_layer import backward_sum_bytes, forward_sum_bytes, norms_over_heads
from mmplan.cost_models.memory_activations import Setting, kept
from mmplan.cost_models.shard import Shard
from mmplan.scenario.scenario import Scenario

CASES = split_cases()
Results = list[dict[tuple[str, bool], SplitResult]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_on_ranks(run_split_cases, PROCESSES, tmp_path_factory.mktemp("ranks"), CASES)


@pytest.mark.distributed
@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_whole_layers(name: str, blind: bool, results: Results) -> None:
    """To 1e-5 of each gradient's largest element; blind: a microbatch without images or clips."""
    for rank in results:
        result = rank[name, blind]
        assert result.starts_alike
        for expected, found in result.losses.values():
            assert found == pytest.approx(expected, rel=1e-6)
        worst = max(result.errors, key=lambda parameter: result.errors[parameter])
        assert result.errors[worst] < 1e-5, worst


@pytest.mark.distributed
@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_summed_and_kept_bytes_are_the_predicted_ones(name: str, blind: bool, results: Results) -> None:
    layers = build_graph(CASES[name]).layers()
    loads = sample_loads(CASES[name], BLIND if blind else SAMPLES)
    shards = [(layer, loads[layer.module], _shard(CASES[name], layer)) for layer in layers]
    forward = sum(forward_sum_bytes(layer, load, "fp32", shard) for layer, load, shard in shards)
    backward = sum(backward_sum_bytes(layer, load, "fp32", shard) for layer, load, shard in shards)
    technique = CASES[name].technique
    kept_bytes = sum(
        round(kept(layer, load, Setting(precision="fp32", technique=technique, shard=shard)).total)
        for layer, load, shard in shards
    )
    for rank in results:
        assert (rank[name, blind].forward_bytes, rank[name, blind].backward_bytes) == (forward, backward)
        if not blind:  # a sequence without context keeps less, and the rows of a capacity are rounded
            assert rank[name, blind].kept_bytes == kept_bytes


def _shard(scenario: Scenario, layer: Layer) -> Shard:
    return Shard(tp=PROCESSES, sequence=scenario.technique.sequence_parallel and splits_rows(layer))


@pytest.mark.parametrize("name", CASES)
def test_the_sums_that_predicted_seconds_count_are_those_of_whole_rows(name: str) -> None:
    """Seconds leave out a few columns: statistics of the loss, a shared rotary key, weights of experts, head norms."""
    graph, loads = build_graph(CASES[name]), sample_loads(CASES[name], SAMPLES)
    for layer in graph.layers():
        load, shard = loads[layer.module], Shard(tp=PROCESSES)
        priced = 4 * sum(reduced_forward_elements(layer, load, shard))
        small = (12 if layer.kind == "loss" else 4 * len(norms_over_heads(layer, shard))) * load.tokens
        assert forward_sum_bytes(layer, load, "fp32", PROCESSES) == priced + small
        priced = 4 * sum(reduced_backward_elements(layer, load, shard))
        assert priced <= backward_sum_bytes(layer, load, "fp32", PROCESSES) <= 1.3 * priced
