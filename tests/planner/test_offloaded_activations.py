"""What blocks keep for their backward, in host memory, as an axis: seconds, memory, bounds, advice, fit."""

import re
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from random_jobs import cuts_above_bounds, groups_of, require_the_best_of_everything, wider_job

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.layout import Layout
from mmplan.cost_models.loads import mean_loads
from mmplan.cost_models.planned_memory import layer_working_bytes, offloaded_bytes, planned_kept_bytes
from mmplan.errors import InfeasibleError
from mmplan.planner.check import check_plan
from mmplan.planner.degrees import Degrees
from mmplan.planner.fit import fit
from mmplan.planner.problem import quickest_levels
from mmplan.planner.search import optimize
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario
from mmplan.scenario.technique import Offload

GUIDE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
(EXAMPLE,) = re.findall(r"(?:^    .*\n)+", GUIDE[GUIDE.index("    name: long\n") :], re.MULTILINE)[:1]


def long_texts(folder: Path, memory: str = "80 GB", offload: str = "[none]") -> Scenario:
    """The example of the guide with other limits."""
    path = folder / "long.yaml"
    text = textwrap.dedent(EXAMPLE).replace("28 GB", memory)
    path.write_text(text.replace("[none, activations]", offload))
    return load_scenario(path)


def away(scenario: Scenario, offload: Offload = "activations") -> Scenario:
    return replace(scenario, technique=replace(scenario.technique, offload=offload))


def test_a_copy_takes_what_is_longer_than_the_block_beside_it(tmp_path: Path) -> None:
    """By hand: a block keeps so many bytes; out beside its forward, and back beside its backward."""
    of = long_texts(tmp_path)
    graph, load = build_graph(of), mean_loads(of, 1)["llm"]
    block, rate = graph.layer("llm.1"), of.cluster.pools[0].device.host_bytes_per_s
    assert rate is not None
    here, there = AnalyticCostModel(of), AnalyticCostModel(away(of))
    for level in ("none", "full"):
        layout = Layout(recompute="full" if level == "full" else "none")
        copy_s = planned_kept_bytes(block, load, of, layout) / rate
        for name in ("forward_s", "backward_s"):
            alone_s = getattr(here, name)(block, load, layout)
            assert getattr(there, name)(block, load, layout) == pytest.approx(max(alone_s, copy_s), rel=1e-9)
    embed = graph.layer("llm.embed")
    assert there.forward_s(embed, load, Layout()) == here.forward_s(embed, load, Layout())


def test_blocks_keep_nothing_on_the_device_but_at_work(tmp_path: Path) -> None:
    of = long_texts(tmp_path)
    graph, load, layout = build_graph(of), mean_loads(of, 1)["llm"], Layout(recompute="half")
    for layer in graph.layers():
        held, waits = planned_kept_bytes(layer, load, of, layout), offloaded_bytes(layer, load, away(of), layout)
        assert waits + planned_kept_bytes(layer, load, away(of), layout) == held
        assert waits == (held if layer.kind == "block" else 0)
        more = layer_working_bytes(layer, load, away(of), layout) - layer_working_bytes(layer, load, of, layout)
        assert more == waits  # its own, on their way


def test_over_a_quick_link_they_wait_on_the_host_for_nothing(tmp_path: Path) -> None:
    """Without that the blocks that memory is short for are recomputed."""
    roomy = optimize(long_texts(tmp_path, "80 GB", "[none, activations]"), gap=0.0)
    assert roomy.plan.scenario.technique.offload == "none"
    assert any("activations of blocks in host memory" in other.reason for other in roomy.runner_ups)
    tight = optimize(long_texts(tmp_path, "28 GB", "[none, activations]"), gap=0.0)
    plan, alone = tight.plan, optimize(long_texts(tmp_path, "28 GB"), gap=0.0).plan
    assert plan.scenario.technique.offload == "activations"
    assert plan.certificate.objective_s == pytest.approx(roomy.plan.certificate.objective_s)
    assert (plan.stages[0].recompute, alone.stages[0].recompute) == ("none", "three quarters")
    told = [float(number) for number in re.findall(r"takes (1\.\d+) s", GUIDE)]
    assert told == [round(one.certificate.objective_s, 2) for one in (plan, alone)]
    assert check_plan(plan) == ()


def test_over_a_slow_link_blocks_are_recomputed_and_their_inputs_wait(tmp_path: Path) -> None:
    of = long_texts(tmp_path, "24.3 GB", "[none, activations]")
    device = replace(of.cluster.pools[0].device, host_bytes_per_s=2e10)
    pools = (replace(of.cluster.pools[0], device=device),)
    plan = optimize(replace(of, cluster=replace(of.cluster, pools=pools)), gap=0.0).plan
    assert plan.scenario.technique.offload == "activations"
    assert plan.stages[0].recompute == "full"
    assert check_plan(plan) == ()


def test_what_does_not_fit_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleError, match=r"constraints\.offload \[(optimizer|activations)\]"):
        optimize(long_texts(tmp_path, "24.3 GB"))
    one, small = Degrees(microbatch_size=1, microbatches=4), long_texts(tmp_path, "28 GB")
    assert any("activations of blocks" in change.text for change in fit(small, one).changes)
    both = fit(away(small, "optimizer+activations"), one).stages[0]
    assert {"optimizer state", "activations"} <= {part.name for part in both.host_parts}
    assert "activations on their way" in {part.name for part in both.moments[0].parts}


def test_no_bound_is_above_the_best_cut(tmp_path: Path) -> None:
    """Recomputing can be quicker than copying, so no level is the quickest of all."""
    of = away(long_texts(tmp_path, "40 GB"))
    pools = tuple(
        replace(pool, devices_per_node=4, device=replace(pool.device, host_bytes_per_s=2e10))
        for pool in of.cluster.pools
    )
    of = replace(of, cluster=replace(of.cluster, pools=pools), constraints=replace(of.constraints, microbatch=()))
    assert len(quickest_levels(of)) > 1
    assert cuts_above_bounds(of) > 10


@pytest.mark.parametrize("seed", [seed for seed in range(24) if groups_of(wider_job(seed)) <= 7])
def test_the_plan_is_the_best_of_everything_with_more_axes(seed: int) -> None:
    require_the_best_of_everything(wider_job(seed))
