"""What `attach` was asked for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mmplan.runtime.health.groups import Groups
from mmplan.runtime.health.rule import Rule

DEFAULT_INTERVAL = 100  # a sampled step costs about two forwards more: `benchmarks/health.csv`


Hook = Callable[..., Any]


class ScalarWriter(Protocol):
    """Such as `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Settings:
    """Meanings are those of `hooks.attach`."""

    modalities: Mapping[str, str]
    branches: Mapping[str, str]
    embeddings: Mapping[str, str] = field(default_factory=dict)
    cross_attention: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    rules: Mapping[str, Rule] = field(default_factory=dict)
    groups: Groups = field(default_factory=Groups)
    file: Path | None = None
    writer: ScalarWriter | None = None
    interval: int = DEFAULT_INTERVAL
    warmup_steps: int = 0
    head_shards: int = 1
    mitigation: float | None = None
    averaged: bool = True
    distributed: bool = False  # parameters are DTensors
    compiled: bool = False  # by torch.compile, which is not to look into hooks
    partial: bool = False  # the model may lack modules that are named
    logits: Callable[[Any], Tensor | None] | None = None

    def hook(self, look: Hook) -> Hook:
        """A hook as it is to be registered."""
        if not self.compiled:
            return look
        untraced: Hook = torch.compiler.disable(look)  # type: ignore[no-untyped-call]
        return untraced

    @property
    def lacking(self) -> bool:
        """Whether modules may lie on other ranks."""
        return self.partial or self.groups.stages is not None

    @property
    def watches_variance(self) -> bool:
        """Not where ranks share layers without DTensors: nobody says which parameters several of them hold."""
        return self.groups.shards is None or self.distributed

    @property
    def places(self) -> tuple[tuple[str, str], ...]:
        """Modules of each modality."""
        return (*self.modalities.items(), *self.branches.items())
