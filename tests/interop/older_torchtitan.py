"""torchtitan 0.2's own parser of TOML, meshes and split of a model, on files named on standard input; run as a script.

One environment cannot hold two versions of a package, so the older one lies in a folder of its own: the first argument.
Its packages are named without running their `__init__`, which import data sets and kernels.

Reads lines of JSON {"file": PATH, "world": N, "layers": N}; writes a line for each: the configuration as 0.2 holds it,
the ranks that the last one is grouped with, the modules of each pipeline rank's parts; or what refused the file.
"""

import json
import sys
import types
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock


def load_older(folder: str) -> None:
    sys.path.insert(0, folder)
    for name in ("torchtitan", "torchtitan.components", "torchtitan.protocols"):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(folder, *name.split(".")))]
        sys.modules[name] = package
    models = types.ModuleType("torchtitan.protocols.train_spec")  # names of types alone; it imports data sets
    models.BaseModelArgs = models.ParallelizeFunction = object  # type: ignore[attr-defined]
    sys.modules[models.__name__] = models
    sys.modules["torchtitan.models.moe.kernels"] = MagicMock()  # wants triton, and none of them is run here


def ask(file: str, world: int, layers: int) -> dict[str, object]:
    from torchtitan.config import ConfigManager

    config = ConfigManager().parse_args([f"--job.config_file={file}"])
    dims = meshes(config.parallelism, world)
    groups = {name: dims.get_mesh(name).mesh.tolist() for name in ("pp", "tp", "cp") if getattr(dims, name) > 1}
    return {"config": asdict(config), "groups": groups, "parts": parts_of(config.parallelism, layers, dims)}


def meshes(parallelism: Any, world: int) -> Any:
    import torch.distributed as dist
    import torchtitan.distributed.parallel_dims as older
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=world - 1, world_size=world, store=FakeStore())
    older.device_type = "cpu"
    dims = older.ParallelDims(
        dp_replicate=parallelism.data_parallel_replicate_degree,
        dp_shard=parallelism.data_parallel_shard_degree,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        pp=parallelism.pipeline_parallel_degree,
        ep=parallelism.expert_parallel_degree,
        etp=parallelism.expert_tensor_parallel_degree,
        world_size=world,
    )
    dims.build_mesh()
    return dims


def parts_of(parallelism: Any, layers: int, dims: Any) -> list[dict[int, list[str]]] | None:
    """For each pipeline rank: stage -> names of the modules that 0.2 leaves in it."""
    import torch
    from torch import nn
    from torchtitan.distributed.pipeline_parallel import pipeline_module_split

    names = parallelism.module_fqns_per_model_part
    if names is None:
        return None
    model = nn.Module()
    for name in ("vision_encoder", "tok_embeddings", "norm", "output"):
        setattr(model, name, nn.Identity())
    model.layers = nn.ModuleDict({str(index): nn.Identity() for index in range(layers)})
    found = []
    for row in range(parallelism.pipeline_parallel_degree):
        mesh = types.SimpleNamespace(
            get_local_rank=lambda row=row: row,
            size=lambda: parallelism.pipeline_parallel_degree,
            get_group=lambda _: dims.get_mesh("pp").get_group(),
        )
        stages, models = pipeline_module_split(
            model, mesh, parallelism.pipeline_parallel_schedule, torch.device("cpu"), names
        )
        kept = [[name for name, _ in part.named_modules() if name not in ("", "layers")] for part in models]
        found.append({stage.stage_index: part for stage, part in zip(stages, kept, strict=True)})
    return found


def main() -> None:
    load_older(sys.argv[1])
    for line in sys.stdin:
        try:
            answer = ask(**json.loads(line))
        except Exception as error:
            answer = {"refused": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer, default=str), flush=True)


if __name__ == "__main__":
    main()
