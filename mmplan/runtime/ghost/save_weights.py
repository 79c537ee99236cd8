"""The weights of a user's own model as a folder of safetensors files, under the names that the model's library saves.

Each stage's first replica writes the pieces it holds. Where the model is of transformers, the library's own conversion
mapping turned round gives names and shapes, and its configuration is saved too, so that `from_pretrained` reads the
folder. The folder appears whole or not at all.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from mmplan.errors import InputError
from mmplan.runtime.checkpoint.folder import sync_folder
from mmplan.runtime.ghost.pretrained import INDEX
from mmplan.runtime.held import Place
from mmplan.runtime.network import gather
from mmplan.runtime.tensor_sums import TensorRanks
from mmplan.runtime.weighted_stage import WeightedStage


def save_weights(
    folder: Path, model: nn.Module, stages: Sequence[WeightedStage], ranks: TensorRanks | None, *, replica: int
) -> None:
    """Write the folder, which does not exist yet. Collective over all ranks.

    Args:
        ranks: those that share blocks with this one.

    Raises:
        InputError: it cannot be written.
    """
    rank, partial = dist.get_rank(), folder.with_name(f".{folder.name}.partial")
    writes = replica == 0 and (ranks is None or ranks.width is None or ranks.width.index == 0)
    whole = _weights(model, stages, ranks, writes=writes)
    own = _converted(model, whole) if whole else {}
    held: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(held, {name: tensor.nbytes for name, tensor in own.items()})
    writers = [other for other, names in enumerate(held) if names]
    try:
        if rank == 0:
            partial.mkdir(exist_ok=True)
        dist.barrier()
        if own:
            save_file(own, partial / _file(writers.index(rank), len(writers)), metadata={"format": "pt"})
        dist.barrier()
        if rank == 0:
            _describe(partial, model, {other: held[other] for other in writers})
            sync_folder(partial)
            partial.rename(folder)
    except OSError as error:
        raise InputError(f"the weights cannot be written: {error.strerror}", file=folder) from error


def _file(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05}-of-{count:05}.safetensors"


def _describe(folder: Path, model: nn.Module, held: Mapping[int, Mapping[str, int]]) -> None:
    """What the library reads beside the weights: where each is, and the configuration of the model."""
    if len(held) > 1:
        files = {name: _file(index, len(held)) for index, names in enumerate(held.values()) for name in names}
        total = sum(sum(names.values()) for names in held.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    parts: dict[str, Any] = {name: getattr(model, name, None) for name in ("config", "generation_config")}
    if hasattr(parts["config"], "save_pretrained"):
        parts["config"].architectures = [type(model).__name__]
        parts["config"].dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    for part in parts.values():
        if hasattr(part, "save_pretrained"):
            part.save_pretrained(folder)


def _weights(
    model: nn.Module, stages: Sequence[WeightedStage], ranks: TensorRanks | None, *, writes: bool
) -> dict[str, Tensor]:
    """Copies of what the stages hold by the names that are saved, none where a rank does not write: of tied parameters
    the library saves the one it ties to. Collective where replicas share weights out."""
    names: dict[int, list[str]] = {}
    tied = set(getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found: dict[str, Tensor] = {}
    for stage in stages:
        for parameter in stage.state.weights():
            known, place = names[id(parameter)], stage.places[parameter]
            whole = _joined(parameter.detach(), place, ranks)
            if _writes(place, writes):
                name = next((one for one in known if one not in tied), known[0])
                found[name] = whole.to("cpu", copy=True).contiguous()
        found |= {buffer.name: buffer.tensor.cpu().contiguous() for buffer in stage.buffers if writes and buffer.writes}
    return found


def _writes(place: Place, writes: bool) -> bool:
    """Whether this rank does. Args: writes: what all have alike, and parts that it has joined."""
    if place.cut is None and place.writes is not None:  # an expert that is a module of its own
        return place.writes and not place.repeated
    return writes and place.writes is not False


def _joined(own: Tensor, place: Place, ranks: TensorRanks | None) -> Tensor:
    """The parameter of which each of the ranks has a part; collective over them where it is one."""
    if place.cut is None or ranks is None:
        return own
    of_experts = place.writes is not None and ranks.experts is not None
    group = ranks.experts.group if of_experts and ranks.experts is not None else ranks.group
    parts = own.new_empty(place.cut.degree * own.numel())
    gather(parts, own.contiguous().view(-1), group)
    return place.cut.joined(tuple(parts.view(place.cut.degree, *own.shape)))


def _converted(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names and shapes of the files instead of the model's."""
    if not hasattr(model, "base_model_prefix"):
        return weights
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5 models held pairs of patterns, and saved their own names
        return weights
    reverted: dict[str, Tensor] = revert_weight_conversion(model, weights)
    return {name: value.contiguous() for name, value in reverted.items()}
