"""Software stacks by name, from `stacks.yaml`: the technique each uses unless told otherwise."""

from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from mmplan.errors import InputError
from mmplan.scenario.document import did_you_mean, listed
from mmplan.scenario.fitted import fitted_below
from mmplan.scenario.origin import Origin, stack_origins
from mmplan.scenario.technique import Technique


@dataclass(frozen=True, kw_only=True, slots=True)
class StackParameters:
    """What a software stack adds to the hardware's seconds. Fractions are of the time a collective takes alone.

    Attributes:
        exposed_tp_forward, exposed_tp_backward: of tensor-parallel communication, not hidden behind computation.
        exposed_cp: of what attention could hide of the context-parallel ring.
        exposed_p2p: of sends between stages in the steady state.
        exposed_dp: of gradient reduction and parameter gathers with `overlap_dp`, even with enough to hide behind.
        fsdp_serial: of min(computation, communication) that does not overlap when parameters are sharded.
        host_op_s: host seconds to launch one operator forward (framework and autograd included).
        fused: projections of one input are one product; activation and gate are one kernel.
        fp8_gather: parameters of FP8 training are gathered in FP8.
        accumulation_bytes: per parameter and microbatch, to add a weight gradient to its fp32 sum.
        pointwise_passes: times that memory-bound operators move their minimal bytes, relative to the catalogue's
            fraction, which covers some.
        gemm_rate: of the catalogue's fraction for matrix products, by the library generation of the stack.
        selective_share: of the forward products and point-wise work of a block that `recompute: selective` repeats
            besides attention (0 in Megatron; remat policies of XLA keep only some products).
        microbatch_s: per microbatch and stage, whatever its size (instruction loop, loss reduction, bookkeeping).
        step_s: per step, whatever the size (data, logging, synchronisation).
    """

    exposed_tp_forward: float = 1.0
    exposed_tp_backward: float = 1.0
    exposed_cp: float = 0.1
    exposed_p2p: float = 1.0
    exposed_dp: float = 1.0
    fsdp_serial: float = 0.2
    host_op_s: float = 0.0
    fused: bool = True
    fp8_gather: bool = False
    accumulation_bytes: float = 8.0
    pointwise_passes: float = 1.0
    gemm_rate: float = 1.0
    selective_share: float = 0.0
    microbatch_s: float = 0.0
    step_s: float = 0.0


@cache
def stack_parameters(stack: str) -> StackParameters:
    """The parameters of a stack; InputError when it is unknown."""
    row = _stack(stack)
    fitted = fitted_below(f"stack.{row.get('fitted_as', stack)}")
    return StackParameters(**{**row["parameters"], **fitted})


def starting_parameters(stack: str) -> StackParameters:
    """The parameters as written in `stacks.yaml`, before any fit."""
    return StackParameters(**_stack(stack)["parameters"])


@cache
def parameter_origins(stack: str) -> tuple[Origin, ...]:
    """Where the parameters of a stack come from; those not listed are defaults. InputError when it is unknown."""
    owner = _stack(stack).get("fitted_as", stack)
    return stack_origins(owner, asdict(starting_parameters(stack)), asdict(StackParameters()))


@cache
def _stacks() -> dict[str, dict[str, Any]]:
    text = resources.files("mmplan.scenario").joinpath("stacks.yaml").read_text(encoding="utf-8")
    content: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return content


def stack_names() -> tuple[str, ...]:
    """All software stacks."""
    return tuple(_stacks())


def technique_of(stack: str = "mmplan", **choices: Any) -> Technique:
    """The defaults of a stack, with `choices` (fields of `Technique`) in their place.

    Raises:
        InputError: the stack is unknown.
        ValueError: choices that contradict each other.
    """
    row = _stack(stack)
    return Technique(stack=stack, **{**row["technique"], **choices})


def stack_source(stack: str) -> str:
    """Where the defaults of a stack come from; InputError when it is unknown."""
    source: str = _stack(stack)["source"]
    return source


def _stack(stack: str) -> dict[str, Any]:
    if stack not in _stacks():
        hint = did_you_mean(stack, _stacks()) or f"; known stacks: {listed(_stacks())}"
        raise InputError(f"unknown software stack '{stack}'{hint}")
    return _stacks()[stack]
