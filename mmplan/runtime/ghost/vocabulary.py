"""Token tables and heads of a user's own model, of which each tensor-parallel rank has the rows or columns of some ids.

A table looks up the ids that a rank has, and all ranks' rows are summed; a head gives a rank's columns of the logits,
which glue hands on to cross entropy (`cut_columns.py`), and the gradient of what it reads is summed (Megatron-LM, arXiv
1909.08053, section 3). The unit's own forward runs; a trial says whether outputs and gradients are those of the whole.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mmplan.errors import InputError
from mmplan.runtime.ghost.cut_columns import FollowColumns
from mmplan.runtime.ghost.recording import Recorder, Recording
from mmplan.runtime.ghost.returning import returning_calls, with_gradient
from mmplan.runtime.ghost.split_linears import Entrance
from mmplan.runtime.ghost.trials import drawn, drawn_block, first_difference, run_drawn
from mmplan.runtime.held import Cut
from mmplan.runtime.network import all_reduce
from mmplan.runtime.tensor_sums import TensorRanks, look_up, split_cross_entropy

LABEL_BYTES = 12  # of a row's largest logit, sum of exponentials and logit of its label, in fp32


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """Units of which ranks have parts. heads: those that give logits, and how many columns these have."""

    tables: frozenset[str]
    heads: Mapping[str, int]
    ranks: TensorRanks

    @property
    def units(self) -> tuple[str, ...]:
        return (*sorted(self.tables), *sorted(self.heads))

    def cuts(self, model: nn.Module) -> dict[str, Cut]:
        """Of parameters, under each of their names."""
        return {
            f"{unit}.{name}": Cut(0, 1, self.ranks.degree)
            for unit in self.units
            for name, _ in model.get_submodule(unit).named_parameters()
        }

    def set_up(self, unit: nn.Module, name: str) -> None:
        """Let a unit of the model, whose parameters are this rank's part, run so."""
        unit.forward = _split_forward(unit, name in self.tables, self.ranks)

    def follow(self, head: str) -> FollowColumns:
        """What glue does with a head's columns."""
        size = self.heads[head]
        return FollowColumns(size=size, whole=_unforeseen, total=partial(_total, size=size, ranks=self.ranks))


def _total(logits: Tensor, labels: Tensor, *, size: int, ranks: TensorRanks) -> Tensor:
    return split_cross_entropy(logits, labels, size, ranks)


def _unforeseen() -> None:
    raise ValueError("glue needs the logits of other ranks, which its recording did not foresee")


def _split_forward(unit: nn.Module, is_table: bool, ranks: TensorRanks) -> Callable[..., Any]:
    forward = unit.forward
    if not is_table:
        entrance = Entrance(1, ranks)
        return lambda x: forward(entrance(x))

    def called(*args: Any, **kwargs: Any) -> Any:
        with _OverTable(ranks):
            return forward(*args, **kwargs)

    return called


class _OverTable(TorchFunctionMode):
    """Looks up the ids that this rank has, and sums."""

    def __init__(self, ranks: TensorRanks) -> None:
        super().__init__()
        self._ranks = ranks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.embedding:
            return func(*args, **(kwargs or {}))
        return self._looked_up(*args, **(kwargs or {}))

    def _looked_up(self, ids: Tensor, table: Tensor, padding_idx: int | None = None, *_: Any, **__: Any) -> Tensor:
        rows = look_up(ids.flatten(), table, self._ranks).view(*ids.shape, table.shape[1])
        if padding_idx is None:
            return rows
        return torch.where((ids == padding_idx).unsqueeze(-1), rows.detach(), rows)  # which has no gradient


def require_columns(recording: Recording) -> None:
    """InputError where glue needs logits of all ranks, which it did not before the run."""
    for head in recording.whole_logits:
        raise InputError(
            f"what the model does with all logits of '{head}' it did not do with the first batches, and "
            "tensor-parallel ranks have columns of them each: set `constraints.tp: [1]` in the scenario and optimize "
            "again"
        )


def find_vocabulary(
    recorder: Recorder,
    *,
    tables: Sequence[str],
    heads: Sequence[str],
    apart: Set[str],
    recordings: tuple[Recording, ...],
    record: Callable[[], tuple[Recording, ...]],
    ranks: TensorRanks,
    device: torch.device,
) -> tuple[Vocabulary | None, tuple[Recording, ...]]:
    """Which of these units ranks share, None for none of them; and the recordings, made again where glue then holds
    columns. Collective over these ranks.

    Args:
        apart: names of parameters that stay whole.
    """
    read = {name for one in recordings for call in (*one.calls, one.loss) for name in call.parameters}
    read |= apart | {name for one in recordings for name in one.glue}
    kept = {id(p) for name, p in recorder.model.named_parameters(remove_duplicate=False) if name in read}
    chosen = {name for name in tables if _is_table(recorder.unit(name), ranks.degree)}
    chosen |= {name for name in heads if _is_head(recorder.unit(name), ranks.degree)}
    chosen = _with_sharers(recorder, chosen, kept)
    alike = {name for name in sorted(chosen) if not _differs(recorder, name, ranks, device)}
    chosen = _with_sharers(recorder, alike, kept)
    while chosen:
        own = frozenset(heads) & chosen
        if own != recorder.heads:
            recorder.heads = own
            recordings = record()
        wanted = {head for one in recordings for head in one.whole_logits}
        if not wanted:
            sizes = {name: recorder.unit(name).get_parameter("weight").shape[0] for name in recorder.heads}
            return Vocabulary(tables=frozenset(tables) & chosen, heads=sizes, ranks=ranks), recordings
        chosen = _with_sharers(recorder, chosen - wanted, kept)
    if recorder.heads:
        recorder.heads = frozenset()
        recordings = record()
    return None, recordings


def _with_sharers(recorder: Recorder, chosen: Set[str], kept: Set[int]) -> set[str]:
    """Without units whose parameters others use that are not chosen. Args: kept: ids of parameters that stay whole."""
    found = set(chosen)
    whole = {id(p) for name in recorder.names - found for p in recorder.unit(name).parameters()} | kept
    while less := {name for name in found if any(id(p) in whole for p in recorder.unit(name).parameters())}:
        found -= less
        whole |= {id(p) for name in less for p in recorder.unit(name).parameters()}
    return found


def _is_table(unit: nn.Module, degree: int) -> bool:
    plain = isinstance(unit, nn.Embedding) and unit.max_norm is None and not (unit.sparse or unit.scale_grad_by_freq)
    shapes = [p.shape for p in unit.parameters()]
    return plain and len(shapes) == 1 and len(shapes[0]) == 2 and shapes[0][0] % degree == 0


def _is_head(unit: nn.Module, degree: int) -> bool:
    return type(unit) is nn.Linear and unit.out_features % degree == 0


def _differs(recorder: Recorder, name: str, ranks: TensorRanks, device: torch.device) -> bool:
    """Whether a table or a head that ranks share is another one; the same on all ranks."""
    unit, given = recorder.unit(name), recorder.arguments.get(recorder.form(name))
    if given is None:
        return True
    cut, table = Cut(0, 1, ranks.degree), isinstance(unit, nn.Embedding)
    counted = ranks.forward_bytes, ranks.backward_bytes
    everything = drawn_block(unit, device, lambda _, value: value)
    whole = run_drawn(everything, everything, *given, device)
    assert not isinstance(whole, str), f"{name} fails alone: {whole}"
    shapes = {key: value.shape for key, value in whole}

    def own(key: str, value: Tensor) -> Tensor:
        if "output" in key:
            return value if table else cut.own(value.movedim(-1, 0), ranks.index).movedim(0, -1)
        return value if "argument" in key else cut.own(value, ranks.index)

    part = drawn_block(unit, device, lambda _, value: cut.own(value, ranks.index))
    forward = _split_forward(part, table, ranks)
    found = run_drawn(part, forward, *given, device, lambda key, _: own(key, drawn(key, shapes[key], device)))
    ranks.forward_bytes, ranks.backward_bytes = counted
    expected = [(key, own(key, value)) for key, value in whole]
    wrong = isinstance(found, str) or first_difference(expected, found) is not None
    failed = torch.tensor([wrong], dtype=torch.int32, device=device)
    all_reduce(failed, ranks.group, dist.ReduceOp.MAX)
    return bool(failed.item())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VocabularySums:
    """Of one stage (see `StageSums`). units: of the stage; trained: names of parameters of the whole model."""

    model: nn.Module
    vocabulary: Vocabulary
    units: Set[str]
    trained: Set[str]

    @property
    def exchanging(self) -> Set[str]:
        return self.units & self.vocabulary.tables

    def forward_bytes(self, recording: Recording) -> int:
        """Rows that are looked up, and what rows of logits need of other ranks."""
        tables = [call for call in recording.calls if call.unit in self.exchanging]
        looked_up: int = sum(leaf.nbytes for call in tables for leaf in call.output.leaves)
        return looked_up + LABEL_BYTES * sum(rows for head, rows in recording.labelled.items() if head in self.units)

    def backward_bytes(self, recording: Recording) -> int:
        """Gradients of what heads read."""
        returning = self.returning(recording)
        total = 0
        for call in recording.calls:
            is_head = call.unit in self.units and call.unit in self.vocabulary.heads
            if is_head and with_gradient(call, returning, self.trained):
                weight = self.model.get_submodule(call.unit).get_parameter("weight")
                total += sum(read for read, _ in call.linears.values()) * weight.element_size()
        return total

    def returning(self, recording: Recording) -> set[tuple[str, int]]:
        return returning_calls(recording, self.model, self.trained)
