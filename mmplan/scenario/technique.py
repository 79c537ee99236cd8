"""How the software executes a step, apart from parallel degrees: what the same GPUs and model can differ in.

Public step times rarely state these choices, so each has a default per software stack (`stacks.yaml`), and every report
shows which was used.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

Attention = Literal["math", "flash1", "flash2", "flash3", "cudnn"]
Fp8 = Literal["none", "tensor", "block", "mx"]
FP8S: tuple[Fp8, ...] = ("none", "tensor", "block", "mx")
Recompute = Literal["none", "selective", "full"]
Sharding = Literal["none", "optimizer", "gradients", "parameters"]
Offload = Literal["none", "optimizer", "parameters", "activations", "optimizer+activations"]
OFFLOADS: tuple[Offload, ...] = get_args(Offload)
OffloadedStates = Literal["none", "optimizer", "parameters"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
SHARDINGS: tuple[Sharding, ...] = ("none", "optimizer", "gradients", "parameters")  # ZeRO-0 to ZeRO-3
Compression = Literal["none", "topk", "fp8"]
COMPRESSIONS: tuple[Compression, ...] = ("none", "topk", "fp8")
LossKernel = Literal["plain", "fused", "chunked"]
ContextParallel = Literal["ring", "gather", "all-to-all"]

ATTENTION_KINDS: tuple[Attention, ...] = ("math", "flash1", "flash2", "flash3", "cudnn")


@dataclass(frozen=True, kw_only=True, slots=True)
class Technique:
    """Software choices of a training step; the defaults are those of mmplan's own runtime (stack `mmplan`)."""

    stack: str = "mmplan"
    """Software stack and generation; its overlap and overhead numbers stand in `stacks.yaml`."""
    attention: Attention = "flash2"
    """`math` writes the score matrix to memory; `flash1`..`flash3` (arXiv 2205.14135, 2307.08691, 2407.08608) and
    `cudnn` (cuDNN 9 fused attention, as in TransformerEngine) do not."""
    fp8: Fp8 = "none"
    """Matrix products of blocks in FP8, with a scale per tensor, per block or per 32 values (MXFP8); the vocabulary
    layer stays in 16 bit."""
    sequence_parallel: bool = False
    """Norms, dropouts and residuals split over the tp ranks (arXiv 2205.05198, section 4.2)."""
    recompute: Recompute = "none"
    """Activations dropped in forward: `selective` the attention core (arXiv 2205.05198, section 5), `full` all
    of a block but its input."""
    recompute_layers: int | None = None
    """With `full`: only so many layers of each stage; None is all."""
    sharding: Sharding = "none"
    """What is split over the dp ranks: ZeRO-1 = `optimizer`, ZeRO-2 and FSDP SHARD_GRAD_OP = `gradients`, ZeRO-3
    and FSDP FULL_SHARD = `parameters` (arXiv 1910.02054, section 5); each includes the ones before."""
    context_parallel: ContextParallel = "ring"
    """With cp > 1: keys and values travel around a `ring` (arXiv 2310.01889), or each rank's attention waits for a
    `gather` of all (arXiv 2407.21783, section 3.3.2), or an `all-to-all` before and after attention trades rows for
    heads (DeepSpeed-Ulysses, arXiv 2309.14509)."""
    offload: Offload = "none"
    """What lives in host memory (arXiv 2101.06840); `parameters` are weights, gradients and optimizer state, each
    rank's share under ZeRO-3 (arXiv 2104.07857); `activations` what blocks keep for their backward (vDNN, arXiv
    1602.08124)."""
    gradient_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Type gradients are accumulated and reduced in; None: the optimizer's `gradient_dtype`."""
    compression: Compression = "none"
    """What replicas send of gradients that are not sharded, where constraints allow it: `topk` the largest 5 % in 1 bit
    of sign and 4 of magnitude, `fp8` the largest 20 % in FP8; what is left out waits for later steps."""
    cross_entropy: LossKernel = "plain"
    """`plain` keeps logits and an fp32 copy; `fused` makes one pass over logits; `chunked` never holds all logits."""
    dropout: bool = False
    """Dropout after attention and MLP: one byte of mask per element (arXiv 2205.05198, section 4.1)."""
    overlap_dp: bool = False
    """Gradient reduction (and the gathers of sharded optimizers) run beside backward and forward."""
    frozen_hooks: bool = False
    """Frozen modules run with gradient hooks on (`enable_input_require_grads`): they keep activations although nothing
    in them is trained."""

    @property
    def host_states(self) -> OffloadedStates:
        """Which states live in host memory."""
        if self.offload == "parameters":
            return "parameters"
        return "optimizer" if self.offload in ("optimizer", "optimizer+activations") else "none"

    @property
    def host_activations(self) -> bool:
        """Whether what blocks keep for their backward waits for it in host memory."""
        return self.offload in ("activations", "optimizer+activations")

    def __post_init__(self) -> None:
        if self.recompute_layers is not None and (self.recompute != "full" or self.recompute_layers < 1):
            raise ValueError(
                f"recompute_layers={self.recompute_layers} needs recompute='full' and at least one layer, "
                f"found recompute='{self.recompute}'"
            )


@lru_cache(maxsize=256)
def recomputing(technique: Technique, level: Recompute) -> Technique:
    """The technique of a layer that is recomputed so, or not."""
    return replace(technique, recompute=level, recompute_layers=None)
