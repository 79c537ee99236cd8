"""A plan as TOML of torchtitan 0.2 (`--job.config_file plan.toml`); its output head is named `output`.

0.1 drops keys that it does not know without a word, the parts of a pipeline and expert parallelism among them.
"""

from collections.abc import Mapping

from mmplan.planner.formats.exported import Exported
from mmplan.planner.formats.torchrun_head import title
from mmplan.planner.formats.torchtitan_job import TitanJob, part_names, titan_job
from mmplan.planner.plan import Plan

TARGET = "torchtitan 0.2"


def export_torchtitan_toml(plan: Plan) -> Exported:
    """`plan.toml`, with `orders.csv` where no name of a schedule says the orders.

    Raises:
        CheckError: the plan is not sound, or needs what torchtitan has no word for.
    """
    job = titan_job(plan, TARGET, before_0_3=True)
    files = {"plan.toml": _text(job)} | ({"orders.csv": job.csv} if job.csv else {})
    notes = [
        "name and flavor of [model] are yours to fill in, and data, tokenizer and steps",
        "0.1 would drop the parts of a pipeline and expert parallelism without a word: take 0.2",
        *(["start in the folder of orders.csv: its path is relative"] if job.csv else []),
    ]
    return Exported(
        target="torchtitan-toml",
        version=TARGET,
        files=files,
        losses=job.draft.losses,
        notes=tuple(notes),
    )


def _text(job: TitanJob) -> str:
    parallelism = {**job.parallelism, "expert_tensor_parallel_degree": job.plan.ranks_per_expert}
    if len(job.parts) > 1:
        parallelism["module_fqns_per_model_part"] = part_names(job, "output")
    if job.csv:
        parallelism["pipeline_parallel_schedule_csv"] = "orders.csv"
    tables: dict[str, Mapping[str, object]] = {
        "training": job.training,
        "parallelism": parallelism,
        "activation_checkpoint": {"mode": "full" if job.recompute else "none"},
        "optimizer": {"name": "AdamW", "lr": job.plan.scenario.optimizer.learning_rate},
    }
    lines = [f"# {title(job.plan, TARGET)}", "", "[model]", '# name = "llama3"', '# flavor = "8B"']
    for name, values in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else f"{value}"
