"""Report cases as jobs: the rows of report_cases.yaml become scenarios and degrees."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from mmplan.planner.degrees import Degrees
from mmplan.planner.fit_job import LORA_TARGETS, Question, cluster_of, job_of
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Moe, Scenario, Training

Case = dict[str, Any]


@cache
def report_file() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("report_cases.yaml").read_text(encoding="utf-8"))
    return content


def job(case: Case, folder: Path) -> tuple[Scenario, Degrees]:
    """The scenario and degrees of a case, through a scenario file and the options of `mmplan fit`."""
    modules = dict(report_file()["models"][case["model"]])
    moe = modules.pop("moe", None)
    edges = [["vision", "projector"], ["projector", "llm"]] if "vision" in modules else []
    data: dict[str, Any] = {"text_tokens": case.get("text_tokens", 2048)}
    if "vision" in modules:
        data |= {"images": case.get("images", 1), "image_size": case.get("image_size", 224)}
    document = {
        "name": case["id"],
        "model": {"modules": modules, "edges": edges},
        "data": data,
        "batch": {"global": case["fit"].get("gbs", case["gpus"] * case["fit"].get("mbs", 1))},
        "precision": "bf16",
        "cluster": {"device": case["gpu"], "nodes": 1, "devices_per_node": min(8, case["gpus"])},
    }
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    scenario = load_scenario(path)
    changed = []
    for module in scenario.model.modules:
        if module.name in case.get("freeze", ()):
            module = replace(module, training=Training(mode="frozen"))
        elif "lora" in case and module.name == "llm":
            targets = LORA_TARGETS[:4] if moe else LORA_TARGETS
            module = replace(module, training=Training(mode="lora", rank=case["lora"], targets=targets))
        if moe and module.name == "llm" and module.transformer is not None:
            module = replace(module, transformer=replace(module.transformer, moe=Moe(**moe)))
        changed.append(module)
    scenario = replace(
        scenario,
        model=replace(scenario.model, modules=tuple(changed)),
        cluster=cluster_of(case["gpu"], case["gpus"], 4 if case["gpus"] % 8 else 8),
    )
    question = Question(scenario=path, choices=tuple(case.get("choices", {}).items()), **case["fit"])
    return job_of(question, scenario)
