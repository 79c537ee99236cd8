"""What the software of a job does, as a scenario file writes it, and published configurations of the job."""

from typing import Annotated, Literal

from pydantic import Field

from mmplan.scenario.schedule_names import ScheduleName
from mmplan.scenario.schema_base import Count, DtypeName, ModuleName, Strict
from mmplan.scenario.technique import ContextParallel, Offload, Recompute, Sharding


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


class RecipeRanksSpec(Strict):
    """Degrees of a module's own ranks in a recipe."""

    tp: Count = Field(default=1, description="tensor-parallel degree")
    cp: Count = Field(default=1, description="context-parallel degree")
    ep: Count = Field(default=1, description="expert-parallel degree")
    dp: Count | None = Field(default=None, description="replicas; default: as is best")
    pp: Count = Field(default=1, description="stages")


class RecipeSpec(Strict):
    """A published configuration of this job, for `mmplan compare --expert`. Degrees as on a launch command."""

    source: Annotated[str, Field(min_length=1)] = Field(description="who published it, and where")
    tp: Count = Field(default=1, description="tensor-parallel degree")
    pp: Count = Field(default=1, description="pipeline stages")
    dp: Count | None = Field(default=None, description="replicas; default: all devices of the cluster")
    cp: Count = Field(default=1, description="context-parallel degree")
    ep: Count = Field(default=1, description="expert-parallel degree")
    etp: Count | None = Field(default=None, description="ranks that share one expert; default: as is best")
    vp: Count = Field(default=1, description="chunks of layers per pipeline rank (interleaved 1F1B)")
    microbatch: Count | None = Field(default=None, description="samples per microbatch; default: as is best")
    schedule: ScheduleName | None = Field(default=None, description="default: 1f1b, interleaved where vp is above 1")
    sharding: Sharding | None = Field(default=None, description="ZeRO over the replicas; default: as is best")
    recompute: Recompute | None = Field(default=None, description="what stages recompute; default: as is best")
    spread: list[ModuleName] | None = Field(
        default=None, description="modules not split by tp, see constraints; default: as is best"
    )
    modules: dict[ModuleName, RecipeRanksSpec] = Field(
        default={}, max_length=50, description="modules on ranks of their own behind those of all others, by name"
    )
    technique: TechniqueSpec | None = Field(
        default=None,
        description="what the software of this run does besides: plans price offload, fp8, sequence_parallel and "
        "context_parallel of it, mmplan fit all",
    )
