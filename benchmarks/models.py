"""Plans of the 32 models of `../shared/data/scenarios/models.yaml`, beside their published recipes and a rule of thumb.

    python benchmarks/models.py [ID ...]     # prints a table and rewrites these rows of benchmarks/models.csv, or all

A row is one cold `mmplan optimize` (`wall_s`, `cpu_s` of the whole command) and `mmplan compare --expert` on its plan.
`parameters`: ours over those that the list derives. `ratio`: step time of the recipe over ours, the closed forms, and
`ratio_per_device` of devices x step time; `recipe_equal_s`: of the recipe as `--naive` cuts it (equal layers; what it
leaves open as small as fits); recipes that are not possible say why. `rule...`: the same of the rule of thumb
(`mmplan/planner/rule_of_thumb.py`), which every model has. Rows that end in `-apart` hold published plans with modules
on ranks of their own against a search with `modules: any`. The last rows are the scale tests with 40 GB on 10,240 and
4,096 devices.
"""

import csv
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from measured import MACHINE, ROOT
from model_scenarios import apart_of, scenario_of

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import op_parameters
from mmplan.errors import InputError, NoPlanFoundError
from mmplan.planner.naive import naive_plan
from mmplan.planner.recipes import pinned
from mmplan.planner.rule_of_thumb import RULE
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario

MODELS = ROOT.parent / "shared" / "data" / "scenarios" / "models.yaml"
SCALE = ("kimi-k25-1t", "internvl35-241b-a28b")  # also with 40 GB


def command(folder: str, *arguments: str) -> tuple[dict[str, Any], float, float]:
    """Document, wall and CPU seconds of a command; the document is its error where it fails."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    line = [sys.executable, "-m", "mmplan", *arguments, "--json", "-"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(line, capture_output=True, text=True, check=False, cwd=folder, env=environment)
    wall_s, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if not result.stdout:
        raise RuntimeError(f"{' '.join(arguments)}: {result.stderr}")
    return json.loads(result.stdout), wall_s, cpu_s


def measure(values: dict[str, Any], note: str, listed: int) -> dict[str, object]:
    """One row."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.yaml"
        file.write_text(yaml.safe_dump(values, sort_keys=False))
        row: dict[str, object] = {"model": values["name"], "parameters": f"{parameters(file) / listed:.4f}"}
        found, wall_s, cpu_s = command(folder, "optimize", "model.yaml", "-o", "best.plan.json")
        if "plan" not in found:
            return row | {"note": found["message"]}
        summary = found["summary"]
        row |= {
            "devices": f"{summary['devices']} of {_devices(values['cluster'])}",
            "configurations": found["considered"]["enumerated"],
            "solved": found["considered"]["solved"],
            "plan": _degrees(summary),
            "objective_s": f"{found['objective_s']:.6g}",
            "simulated_s": f"{summary['step_time_s']:.6g}",
            "gap": f"{found['gap']:.4%}",
            "status": found["status"],
            "wall_s": f"{wall_s:.1f}",
            "cpu_s": f"{cpu_s:.1f}",
        }
        document, _, _ = command(folder, "compare", "best.plan.json", "--expert")
        row |= _expert(document, RULE, "rule")
        for name, recipe in values.get("recipes", {}).items():
            row |= _expert(document, name, "recipe")
            row["recipe"] = ", ".join(f"{key} {value}" for key, value in recipe.items() if key != "source")
            row["recipe_equal_s"] = "" if "modules" in recipe else _equal_layers(load_scenario(file))
    return row | {"note": note}


def parameters(file: Path) -> int:
    """Weights of a scenario's model, adapters included."""
    return sum(op_parameters(op) for layer in build_graph(load_scenario(file)).layers() for op in layer.ops)


def _devices(cluster: dict[str, Any]) -> int:
    return sum(pool["nodes"] * pool["devices_per_node"] for pool in cluster.get("pools", [cluster]))


def _degrees(summary: dict[str, Any]) -> str:
    named = [f"{key} {summary[key]}" for key in ("pp", "dp", "cp", "tp", "ep") if summary[key] > 1]
    return ", ".join([*named, f"mbs {summary['microbatch_size']}", f"{summary['sharding']} sharded"])


def _expert(document: dict[str, Any], name: str, column: str) -> dict[str, object]:
    """What `compare --expert` says of one recipe; `column`: what the names of its columns begin with."""
    (told,), ours = [one for one in document["recipes"] if one["name"] == name], document["plans"][0]
    ratio = "ratio" if column == "recipe" else f"{column}_ratio"
    if told["plan"] is None:
        return {column: "", f"{column}_told": f"not possible: {told['reason']}"}
    (theirs,) = [one for one in document["plans"] if one["name"] == told["plan"]]
    objectives = theirs["objective_s"] / ours["objective_s"]
    return {
        column: _degrees(theirs) + "".join(f"; {mesh}" for mesh in theirs["meshes"]),
        f"{column}_objective_s": f"{theirs['objective_s']:.6g}",
        f"{column}_simulated_s": f"{theirs['step_time_s']:.6g}",
        ratio: f"{objectives:.4f}",
        f"{ratio}_per_device": f"{objectives * theirs['devices'] / ours['devices']:.4f}",
        f"{ratio}_simulated": f"{theirs['step_time_s'] / ours['step_time_s']:.4f}",
        f"{column}_told": "; ".join(filter(None, (told["reason"], told["note"]))),
    }


def _equal_layers(scenario: Scenario) -> str:
    """Closed form of the recipe as cut by hand, or why there is no such plan."""
    try:
        plan = naive_plan(pinned(scenario, scenario.recipes[0]))
    except (InputError, NoPlanFoundError) as error:
        return str(error)
    return f"{plan.certificate.objective_s:.6g}"


def cases() -> list[tuple[dict[str, Any], str, int]]:
    """Scenario values, note and listed parameters of every model, then of the scale tests with less memory."""
    listed = yaml.safe_load(MODELS.read_text())
    entries = {entry["id"]: entry for entry in listed["scenarios"]}
    sizes = {name: entry["derived"]["total_params"] for name, entry in entries.items()}
    found = []
    for name, entry in entries.items():
        values, note = scenario_of(entry, listed["clusters"])
        found.append((values, note, sizes[name]))
        if "hetero" in entry.get("reference_plan", {}):
            apart = apart_of(values, entry, listed["clusters"][entry["cluster"]])
            found.append((apart, note.partition(";")[0], sizes[name]))
    for name in SCALE:
        values, note = scenario_of(entries[name], listed["clusters"])
        cluster = values["cluster"] | {"memory": "40 GiB"}
        found.append((values | {"name": f"{name}-40gb", "cluster": cluster}, note, sizes[name]))
    return found


COLUMNS = (
    *("model", "parameters", "devices", "configurations", "solved", "plan", "objective_s", "simulated_s"),
    *("gap", "status", "wall_s", "cpu_s", "recipe", "recipe_objective_s", "recipe_equal_s", "recipe_simulated_s"),
    *("ratio", "ratio_per_device", "ratio_simulated", "recipe_told", "rule", "rule_objective_s", "rule_simulated_s"),
    *("rule_ratio", "rule_ratio_per_device", "rule_ratio_simulated", "rule_told", "note", "machine"),
)
ROWS = ROOT / "benchmarks" / "models.csv"


def main() -> None:
    wanted = sys.argv[1:]
    every = cases()
    with ROWS.open(newline="") as file:
        rows: dict[str, dict[str, object]] = {row["model"]: dict(row) for row in csv.DictReader(file)}
    for values, note, listed in every:
        if wanted and values["name"] not in wanted:
            continue
        row = measure(values, note, listed) | {"machine": MACHINE}
        rows[values["name"]] = row
        print(*(row.get(key, "") for key in COLUMNS[:-1]), sep="\t", flush=True)
    with ROWS.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=COLUMNS)
        writer.writeheader()
        writer.writerows(rows[values["name"]] for values, _, _ in every if values["name"] in rows)


if __name__ == "__main__":
    main()
