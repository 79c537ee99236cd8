"""Plans side by side, from Python."""

from pathlib import Path

import mmplan


def test_compare_keeps_the_order_and_the_names() -> None:
    scenario = mmplan.load_scenario(Path(__file__).parents[2] / "scenarios" / "tiny.yaml")
    best = mmplan.optimize(scenario).plan
    first, second = mmplan.compare({"b": best, "a": best})
    assert (first.name, second.name) == ("b", "a")
    assert first.step_time_s == second.step_time_s > 0
