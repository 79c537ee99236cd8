"""What it brings to run frozen encoders a step ahead, on shipped scenarios.

    python benchmarks/prefetch.py [SCENARIO[:pp] ...]  # their rows in benchmarks/prefetch.csv, new or in place

Each scenario is planned twice to a gap of 1 %: as it is, and with `constraints.prefetch: any`; `:4` pins four pipeline
stages in both. `tiny` gets a frozen vision encoder of 32 blocks and one replica: it is as much work as a stage.
Seconds are of the simulation of mean microbatches; `gain` is of these, and `bound_s` holds for any schedule. `gap`: of
the closed form, over all degrees with and without steps ahead.
"""

from dataclasses import replace

from asked import planned, write_asked
from measured import MACHINE, ROOT

from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import ModelModule, Scenario, Training

SCENARIOS = ("llava-1.5-7b-sft", "qwen2.5-vl-7b-lora", "qwen2.5-vl-72b-lora", "whisper-llama3-8b")
SCENARIOS += (*(f"{name}:4" for name in SCENARIOS), "tiny:3", "tiny:4")


def _deep(scenario: Scenario) -> Scenario:
    """With 32 frozen vision blocks, on one replica."""

    def changed(module: ModelModule) -> ModelModule:
        if module.name != "vision" or module.transformer is None:
            return module
        shape = replace(module.transformer, layers=32)
        return replace(module, transformer=shape, training=Training(mode="frozen"))

    model = replace(scenario.model, modules=tuple(map(changed, scenario.model.modules)))
    return replace(scenario, model=model, constraints=replace(scenario.constraints, dp=(1,)))


def row(name: str) -> dict[str, object]:
    short, _, stages = name.partition(":")
    scenario = load_scenario(ROOT / "scenarios" / f"{short}.yaml")
    scenario = _deep(scenario) if short == "tiny" else scenario
    rules = replace(scenario.constraints, pp=(int(stages),)) if stages else scenario.constraints
    before, after = (planned(replace(scenario, constraints=replace(rules, prefetch=asked))) for asked in ((), None))
    alone, ahead = before.result, after.result
    return {
        "scenario": name,
        "devices": scenario.cluster.device_count,
        "alone": str(alone.configuration),
        "prefetch": " ".join(ahead.plan.prefetch),
        "stages_ahead": sum(map(ahead.plan.is_ahead, range(len(ahead.plan.stages)))),
        "pp": ahead.plan.pp,
        "alone_s": f"{before.step_s:.6f}",
        "ahead_s": f"{after.step_s:.6f}",
        "bound_s": f"{ahead.plan.certificate.any_schedule_s:.6f}",
        "gap": f"{ahead.gap:.4f}",
        "gain": f"{1 - after.step_s / before.step_s:.4f}",
        "alone_wall_s": f"{alone.wall_s:.1f}",
        "ahead_wall_s": f"{ahead.wall_s:.1f}",
        "command": f"python benchmarks/prefetch.py {name}",
        "machine": MACHINE,
    }


if __name__ == "__main__":
    write_asked("prefetch", __doc__ or "", SCENARIOS, row)
