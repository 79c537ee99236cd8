"""What other runtimes do when a rank's microbatch lacks a modality, as far as it decides whether ranks agree.

Read off their documentation and the reports that name the cause: FSDP gathers a layer's parameters when the layer runs
(huggingface/transformers 37186), ZeRO-3 too (deepspeedai/DeepSpeed 7170); ZeRO-2 reduces the gradients that a backward
has made (modelscope/ms-swift 9104: 1 element against 402,653,184); pipelines receive one tensor of fixed length for
every microbatch, in a fixed order of sends and receives (radixark/miles 2406, NVIDIA/Megatron-LM 5100).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mmplan.cost_models.counts import parameters, trainable_parameters
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.load import Loads
from mmplan.scenario.scenario import DTYPE_BYTES, Scenario

RuntimeName = Literal["mmplan", "fsdp", "zero3", "zero2", "megatron-pp"]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective call of a rank; members of a group must make equal ones in one order."""

    kind: Literal["all-gather", "reduce-scatter", "reduce"]
    what: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.what} ({self.bytes:,} bytes)"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataParallelRules:
    """A runtime whose ranks all hold the whole model.

    gathers: parameters of a layer are gathered when it runs, forward and backward, and its gradients reduced at once.
    Else the gradients that the backward has made are reduced together at its end. fix: what makes all ranks agree.
    """

    gathers: bool
    fix: str


_DUMMY = (
    "run {modules} on a dummy input on every rank and add its output times zero to the loss, or draw batches so that "
    "the same microbatches have {what} on all ranks"
)
DATA_PARALLEL: dict[RuntimeName, DataParallelRules] = {
    "fsdp": DataParallelRules(gathers=True, fix=_DUMMY),
    "zero3": DataParallelRules(gathers=True, fix=_DUMMY),
    "zero2": DataParallelRules(
        gathers=False, fix=_DUMMY + ", or fill missing gradients with zeros before they are reduced"
    ),
}


def collectives(
    scenario: Scenario, graph: ComputationGraph, rules: DataParallelRules, loads: Loads
) -> tuple[Collective, ...]:
    """The calls of one rank for one microbatch, forward and backward. A layer without tokens does not run."""
    ran = [layer for layer in graph.layers() if loads[layer.module].tokens > 0]
    backward = [layer for layer in reversed(ran) if layer.has_backward]
    gradient_bytes = DTYPE_BYTES[scenario.optimizer.gradient_dtype]
    if not rules.gathers:
        size = sum(trainable_parameters(layer) for layer in backward) * gradient_bytes
        return (Collective("reduce", "the gradients of " + _modules(backward), size),)
    gathers = {
        layer.id: Collective("all-gather", layer.id, count * DTYPE_BYTES[scenario.precision_of(layer)])
        for layer in ran
        if (count := parameters(layer))
    }
    calls = list(gathers.values())
    for layer in backward:
        if layer.id in gathers:
            calls.append(gathers[layer.id])
        if trainable_parameters(layer):
            size = trainable_parameters(layer) * gradient_bytes
            calls.append(Collective("reduce-scatter", f"the gradients of {layer.id}", size))
    return tuple(calls)


def first_difference(a: Sequence[Collective], b: Sequence[Collective]) -> tuple[int, str, str] | None:
    """Where two ranks make unequal calls, and what each is at then."""
    for index in range(max(len(a), len(b))):
        here = str(a[index]) if index < len(a) else "the end of the step"
        there = str(b[index]) if index < len(b) else "the end of the step"
        if here != there:
            return index, here, there
    return None


def _modules(layers: Sequence[Layer]) -> str:
    return ", ".join(sorted({layer.module for layer in layers if layer.trainable})) or "nothing"
