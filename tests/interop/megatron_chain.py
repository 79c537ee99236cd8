"""Megatron-Core's own parsers, one after the other, on command lines from standard input; run as a script.

No layer of them sees everything (`validate_args` lets a wrong layer count pass, `TransformerConfig` a wrong world), so
all are asked: parse_args, validate_args, core_transformer_config_from_args, then parallel_state on groups that do
not communicate, then the layers of every pipeline rank. What is patched first only lets the package load without CUDA.

Reads lines of JSON {"argv": [...], "world": N}; writes a line for each: what it made of it, or which layer refused it.
"""

import json
import os
import sys
import types
import typing
import warnings
from contextlib import redirect_stdout
from io import StringIO


def load_megatron() -> None:
    """Python 3.11 has no typing.override; one module imports triton; some checks ask for the device."""
    import torch

    def nothing(name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    if not hasattr(typing, "override"):
        typing.override = lambda method: method  # type: ignore[attr-defined]
    kernels = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
    kernels.__getattr__ = nothing  # type: ignore[method-assign, assignment]
    sys.modules[kernels.__name__] = kernels
    torch.cuda.get_device_capability = lambda *_, **__: (9, 0)  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda *_, **__: types.SimpleNamespace(major=9, minor=0, name="H100")
    warnings.filterwarnings("ignore")


def ask(argv: list[str], world: int, connections: str | None) -> dict[str, object]:
    """What the chain makes of one command line."""
    from megatron.core import parallel_state
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import parse_args, validate_args

    os.environ.update(WORLD_SIZE=str(world), RANK="0", LOCAL_RANK="0")
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if connections is not None:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = connections
    sys.argv = ["pretrain_gpt.py", *argv, "--no-rope-fusion"]  # the fused kernel is TransformerEngine's
    layer = "parse_args"
    try:
        args = parse_args()
        layer = "validate_args"
        validate_args(args)
        layer = "TransformerConfig"
        config = core_transformer_config_from_args(args)
        layer = "parallel_state"
        groups = parallel_groups(args, world)
        layer = "layers"
        blocks = blocks_of_ranks(args, config)
        return {"args": plain(vars(args)), "groups": groups, "blocks": blocks}
    except SystemExit as error:
        return {"refused": layer, "why": f"argparse, exit {error.code}"}
    except Exception as error:
        return {"refused": layer, "why": f"{type(error).__name__}: {error}"}
    finally:
        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()


def parallel_groups(args: typing.Any, world: int) -> dict[str, list[list[int]]]:
    """Ranks of every group, by Megatron's own order; `initialize_model_parallel` has to accept the degrees."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        order="tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,
    )
    tp, pp, cp = (getattr(args, f"{name}_parallel_size") for name in ("tensor_model", "pipeline_model", "context"))
    ep, etp = args.expert_model_parallel_size, args.expert_tensor_parallel_size
    dense = parallel_state.RankGenerator(tp=tp, ep=1, dp=world // (tp * pp * cp), pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    experts = parallel_state.RankGenerator(
        tp=etp, ep=ep, dp=world // (etp * ep * pp), pp=pp, cp=1, order="tp-cp-ep-dp-pp"
    )
    return {
        **{token: dense.get_ranks(token) for token in ("tp", "cp", "dp", "pp")},
        **{f"expert {token}": experts.get_ranks(token) for token in ("tp", "ep", "dp")},
    }


def blocks_of_ranks(args: typing.Any, config: typing.Any) -> list[list[list[int]]]:
    """Block indices by pipeline rank and chunk, together every block once."""
    from megatron.core import parallel_state

    layout = config.pipeline_model_parallel_layout
    if layout is None:
        assert args.pipeline_model_parallel_size == 1, "only pipelines without a layout"
        return [[list(range(args.num_layers))]]
    chunks = args.virtual_pipeline_model_parallel_size or 1
    if chunks > 1:
        parallel_state.set_virtual_pipeline_model_parallel_rank(0)
    found = [
        [layout.get_layer_id_list(pp_rank=rank, vp_stage=chunk) for chunk in range(chunks)]
        for rank in range(args.pipeline_model_parallel_size)
    ]
    every = sorted(block for rank in found for chunk in rank for block in chunk)
    assert every == list(range(args.num_layers)), f"layers {every}"
    return found


def plain(values: dict[str, object]) -> dict[str, object]:
    """What JSON can hold; the rest as text."""
    kept = (int, float, str, bool, list, type(None))
    return {name: value if isinstance(value, kept) else str(value) for name, value in values.items()}


if __name__ == "__main__":
    load_megatron()
    for line in sys.stdin:
        asked = json.loads(line)
        with redirect_stdout(StringIO()):
            told = ask(asked["argv"], asked["world"], asked.get("connections"))
        print(json.dumps(told, default=str), flush=True)
