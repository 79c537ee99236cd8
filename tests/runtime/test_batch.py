"""Synthetic data: the same sample whatever the batch around it, and as large as the cost model counts."""

from dataclasses import replace

import pytest
import torch
from tiny_plans import TWO_STAGES, hand_plan, tiny_scenario

from mmplan.runtime.batch import NO_LABEL, Microbatch, make_microbatch
from mmplan.runtime.places import Place
from mmplan.runtime.train import step_data, step_microbatches
from mmplan.scenario.samples import draw_samples

MODULES = ("vision", "audio", "llm")
CPU = torch.device("cpu")


def batch_of(first_index: int, count: int) -> Microbatch:
    scenario = tiny_scenario()
    return make_microbatch(
        scenario,
        draw_samples(scenario.data, scenario.seed, first_index, count),
        indices=range(first_index, first_index + count),
        targets_in_batch={"llm": 1},
        raw_modules=MODULES,
        dtype=torch.float32,
        device=CPU,
    )


def test_a_sample_is_the_same_in_every_microbatch() -> None:
    together, second = batch_of(3, 2), batch_of(4, 1)
    for module in MODULES:
        own = second.inputs[module]
        assert torch.equal(together.inputs[module][len(together.inputs[module]) - len(own) :], own)
    labels = second.labels["llm"]
    assert torch.equal(together.labels["llm"][-len(labels) :], labels)


def test_sizes_are_those_the_cost_model_counts() -> None:
    plan = hand_plan(replace(tiny_scenario(), global_batch=8), TWO_STAGES, dp=2, microbatch_size=2)
    data = step_data(plan, 3)
    for replica in range(plan.dp):
        batches = step_microbatches(plan, data, Place(0, replica, 0), MODULES, CPU)
        for batch, loads in zip(batches, data.loads[replica], strict=True):
            for module in MODULES:
                assert batch.inputs[module].numel() == loads[module].input_elements
                assert sum(batch.lengths[module]) == loads[module].tokens
            assert int((batch.labels["llm"] != NO_LABEL).sum()) == loads["llm"].targets
    assert batches[0].targets_in_batch["llm"] == sum(loads["llm"].targets for row in data.loads for loads in row)


def test_every_row_of_a_sequence_has_one_source_and_labels_are_the_next_text_token() -> None:
    batch = batch_of(0, 5)
    positions = batch.merge_positions["llm"]
    rows = torch.cat(list(positions.values())).sort().values
    assert torch.equal(rows, torch.arange(sum(batch.lengths["llm"])))
    ids, labels = batch.inputs["llm"], batch.labels["llm"][positions["text"]]
    predicted = labels != NO_LABEL
    assert torch.equal(labels[predicted], ids.roll(-1)[predicted])
    assert int((~predicted).sum()) == 5  # the last token of each sample predicts nothing


def test_inputs_nobody_reads_are_not_made() -> None:
    scenario = tiny_scenario()
    batch = make_microbatch(
        scenario,
        draw_samples(scenario.data, scenario.seed, 0, 1),
        indices=(0,),
        targets_in_batch={},
        raw_modules=(),
        dtype=torch.float32,
        device=CPU,
    )
    assert not batch.inputs
    assert batch.labels.keys() == {"llm"}


def test_a_projector_has_no_raw_input() -> None:
    scenario = tiny_scenario()
    with pytest.raises(ValueError, match="module projector has no raw input"):
        make_microbatch(
            scenario,
            draw_samples(scenario.data, scenario.seed, 0, 1),
            indices=(0,),
            targets_in_batch={},
            raw_modules=("projector",),
            dtype=torch.float32,
            device=CPU,
        )
