"""The form of `technique:` in a scenario and in a published recipe: what the software does, apart from degrees."""

from typing import Literal

from pydantic import Field

from mmplan.scenario.schema_base import Count, DtypeName, Strict
from mmplan.scenario.technique import ContextParallel, Offload


class TechniqueSpec(Strict):
    """How the software executes a step, apart from degrees. What is not written follows from `stack`."""

    stack: str = Field(default="mmplan", description="software stack and generation, see `stacks.yaml`")
    attention: Literal["math", "flash1", "flash2", "flash3", "cudnn"] | None = Field(
        default=None, description="attention implementation"
    )
    fp8: Literal["none", "tensor", "block", "mx"] | None = Field(
        default=None, description="matrix products of blocks in FP8: scale per tensor, per block, or per 32 values"
    )
    sequence_parallel: bool | None = Field(default=None, description="norms and residuals split over tp ranks")
    recompute: Literal["none", "selective", "full"] | None = Field(default=None, description="activations dropped")
    recompute_layers: Count | None = Field(default=None, description="with full: so many layers of each stage")
    sharding: Literal["none", "optimizer", "gradients", "parameters"] | None = Field(
        default=None, description="split over dp ranks: ZeRO-1, ZeRO-2, ZeRO-3 (FSDP)"
    )
    context_parallel: ContextParallel | None = Field(
        default=None, description="with cp > 1: ring attention, keys and values gathered, or all-to-all (Ulysses)"
    )
    offload: Offload | None = Field(default=None, description="kept in host memory")
    gradient_dtype: DtypeName | None = Field(
        default=None, description="type gradients are summed and reduced in; default: the optimizer's"
    )
    cross_entropy: Literal["plain", "fused", "chunked"] | None = Field(default=None, description="loss kernel")
    dropout: bool | None = Field(default=None, description="dropout after attention and MLP")
    overlap_dp: bool | None = Field(default=None, description="gradient reduction beside backward")
    frozen_hooks: bool | None = Field(default=None, description="frozen modules run with gradient hooks on")
