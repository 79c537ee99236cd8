"""What it brings to run encoders for several microbatches of the language model at once, on shipped scenarios.

    python benchmarks/encode_together.py [SCENARIO ...]  # their rows in benchmarks/encode_together.csv, new or in place

Each scenario is planned twice to a gap of 1 %: as it is, and with `constraints.encode_together: any` (1, 2, 4 or 8).
Seconds are of the closed form and of the simulation of mean microbatches; `gain`: of the simulated step.
"""

from dataclasses import replace

from asked import planned, write_asked
from measured import MACHINE, ROOT

from mmplan.scenario.load import load_scenario

SCENARIOS = ("llava-1.5-7b-pretrain", "llava-ov-7b", "qwen2-vl-7b", "internvl2.5-26b", "internvl2.5-78b", "pixtral-12b")
SCENARIOS += ("qwen2-audio-7b", "whisper-llama3-8b", "qwen2.5-omni-7b", "vitl16-llama3-8b", "tiny")


def row(name: str) -> dict[str, object]:
    scenario = load_scenario(ROOT / "scenarios" / f"{name}.yaml")
    free = replace(scenario, constraints=replace(scenario.constraints, encode_together=None))
    before, after = planned(scenario), planned(free)
    alone, together = before.result, after.result
    return {
        "scenario": name,
        "devices": scenario.cluster.device_count,
        "alone": str(alone.configuration),
        "together": str(together.configuration),
        "batch_factor": together.plan.batch_factor,
        "alone_s": f"{alone.plan.certificate.objective_s:.6f}",
        "together_s": f"{together.plan.certificate.objective_s:.6f}",
        "together_bound_s": f"{together.bound_s:.6f}",
        "gap": f"{together.gap:.4f}",
        "alone_simulated_s": f"{before.step_s:.6f}",
        "together_simulated_s": f"{after.step_s:.6f}",
        "gain": f"{1 - after.step_s / before.step_s:.4f}",
        "alone_wall_s": f"{alone.wall_s:.1f}",
        "together_wall_s": f"{together.wall_s:.1f}",
        "command": f"python benchmarks/encode_together.py {name}",
        "machine": MACHINE,
    }


if __name__ == "__main__":
    write_asked("encode_together", __doc__ or "", SCENARIOS, row)
