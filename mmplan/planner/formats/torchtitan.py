"""A plan as a Python configuration of torchtitan 0.3: `--module torchtitan_plan --config plan`.

torchtitan reads a model from its registry, so the file takes a configuration there and sets what the plan says. It
checks what torchtitan does not: that the model has the plan's blocks, and that the parts hold every module once
(`_split_module` drops what nobody names).
"""

from mmplan.planner.formats.exported import Exported
from mmplan.planner.formats.torchrun_head import title
from mmplan.planner.formats.torchtitan_job import TitanJob, part_names, titan_job
from mmplan.planner.plan import Plan
from mmplan.scenario.scenario import ModelModule

TARGET = "torchtitan"
# (blocks, width, heads, with a vision encoder) -> function in torchtitan/models/*/config_registry.py of 0.3.0
REGISTRY = {
    (32, 4096, 32, False): "llama3.config_registry:llama3_8b",
    (80, 8192, 64, False): "llama3.config_registry:llama3_70b",
    (126, 16384, 128, False): "llama3.config_registry:llama3_405b",
    (28, 1024, 16, False): "qwen3.config_registry:qwen3_0_6b",
    (28, 2048, 16, False): "qwen3.config_registry:qwen3_1_7b",
    (40, 5120, 40, False): "qwen3.config_registry:qwen3_14b",
    (48, 2048, 32, False): "qwen3.config_registry:qwen3_30b_a3b",
    (64, 5120, 64, False): "qwen3.config_registry:qwen3_32b",
    (61, 7168, 128, False): "deepseek_v3.config_registry:deepseek_v3_671b",
    (61, 7168, 64, True): "kimi_k2_7.config_registry:kimi_k2_5",
}


def export_torchtitan(plan: Plan) -> Exported:
    """`torchtitan_plan.py`, with `orders.csv` where no name of a schedule says the orders.

    Raises:
        CheckError: the plan is not sound, or needs what torchtitan has no word for.
    """
    job = titan_job(plan, TARGET)
    files = {"torchtitan_plan.py": _module(job)} | ({"orders.csv": job.csv} if job.csv else {})
    notes = [f"torchrun ... -m torchtitan.train --module torchtitan_plan --config plan, on {job.plan.rank_count} ranks"]
    if _registered(job) is None:
        notes.append("torchtitan 0.3 has no such model: name yours in TORCHTITAN_BASE=package.module:function")
    notes.append("data, tokenizer, optimizer and checkpoints are those of the configuration it starts from")
    return Exported(
        target="torchtitan", version="torchtitan 0.3", files=files, losses=job.draft.losses, notes=tuple(notes)
    )


def _registered(job: TitanJob) -> str | None:
    shape = job.module.transformer
    assert shape is not None
    encoder = any(module.vision is not None for module in job.plan.scenario.model.modules)
    found = REGISTRY.get((shape.layers, shape.hidden, shape.heads, encoder))
    return None if found is None else f"torchtitan.models.{found}"


def _fields(values: object, indent: str = "    ") -> str:
    """Lines of a dict literal, lists of parts one a line."""
    assert isinstance(values, dict)
    lines = []
    for name, value in values.items():
        if isinstance(value, list):
            rows = "".join(f"{indent}    {_literal(row)},\n" for row in value)
            lines.append(f'{indent}"{name}": [\n{rows}{indent}],\n')
        else:
            lines.append(f'{indent}"{name}": {_literal(value)},\n')
    return "".join(lines)


def _literal(value: object) -> str:
    return repr(value).replace("'", '"')


def _language(module: ModelModule) -> int:
    assert module.transformer is not None
    return module.transformer.layers


def _module(job: TitanJob) -> str:
    technique = job.plan.scenario.technique
    parallelism = {**job.parallelism, "enable_sequence_parallel": technique.sequence_parallel}
    if len(job.parts) > 1:
        parallelism["module_fqns_per_model_part"] = part_names(job, "lm_head")
    training = {**job.training, "disable_cuda_graphs": True} if len(job.parts) > 1 else dict(job.training)
    imports = ["import os", "from importlib import import_module"]
    imports += ["from pathlib import Path"] if job.csv else []
    imports += ["", "from torchtitan.distributed.activation_checkpoint import FullAC"] if job.recompute else []
    recompute = "FullAC.Config()" if job.recompute else "None"
    orders = '    config.parallelism.pipeline_parallel_schedule_csv = str(Path(__file__).with_name("orders.csv"))\n'
    return f'''"""{title(job.plan, TARGET)}."""

{chr(10).join(imports)}

WORLD_SIZE = {job.plan.rank_count}
LAYERS = {_language(job.module)}
PARALLELISM = {{
{_fields(parallelism)}}}
TRAINING = {{
{_fields(training)}}}


def plan():
    """The configuration TORCHTITAN_BASE (package.module:function) with the plan's degrees, parts and batch."""
    base = os.environ.get("TORCHTITAN_BASE", "{_registered(job) or ""}")
    if ":" not in base:
        raise ValueError("set TORCHTITAN_BASE to package.module:function of your model's configuration")
    package, _, function = base.partition(":")
    config = getattr(import_module(package), function)()
    world = int(os.environ.get("WORLD_SIZE", WORLD_SIZE))
    if world != WORLD_SIZE:
        raise ValueError(f"the plan has {{WORLD_SIZE}} ranks, this run {{world}}")
    layers = len(config.model_spec.model.layers)
    if layers != LAYERS:
        raise ValueError(f"the plan has {{LAYERS}} layers, {{base}} {{layers}}")
    require_every_module_once(config.model_spec.model)
    for name, value in PARALLELISM.items():
        setattr(config.parallelism, name, value)
    for name, value in TRAINING.items():
        setattr(config.training, name, value)
{orders if job.csv else ""}    config.activation_checkpoint = {recompute}
    return config


def require_every_module_once(model):
    """torchtitan's own split drops a module that no part names."""
    parts = PARALLELISM.get("module_fqns_per_model_part")
    if parts is None:
        return
    encoder = ["vision_encoder"] if getattr(model, "vision_encoder", None) is not None else []
    wanted = [*encoder, "tok_embeddings", *(f"layers.{{index}}" for index in range(LAYERS)), "norm", "lm_head"]
    named = [name for part in parts for name in part]
    if sorted(named) != sorted(wanted):
        raise ValueError(f"the parts name {{sorted(set(named) ^ set(wanted))}} not exactly once")
'''
