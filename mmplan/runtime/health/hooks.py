"""Training health of any PyTorch loop, attached by one line.

    health = attach(model, modalities={"vision": "vision_tower", "text": "language_model"}, file="health.jsonl")

The model's forwards and the step of whichever optimizer has its parameters are noticed by hooks; a loop without torch
optimizers calls `health.step()` behind each backward. In every step losses and gradients are looked at for Inf and NaN;
in every `interval`-th step all monitors take a reading. With groups, all their ranks do so together.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import mmplan
from mmplan.runtime.health import loss, statistics
from mmplan.runtime.health.contributions import Contributions, fsdp_modules, gradient_sound
from mmplan.runtime.health.dispersion import PooledDispersion
from mmplan.runtime.health.drift import EmbeddingDrift
from mmplan.runtime.health.groups import Groups, found_groups, largest
from mmplan.runtime.health.judge import Judge, Value
from mmplan.runtime.health.loss import LossWatch
from mmplan.runtime.health.overflow import HEADROOM as HEADROOM_RULE
from mmplan.runtime.health.overflow import headroom, leaves, tensors_of
from mmplan.runtime.health.places import guessed_branches, guessed_modalities, modality_of, module_at
from mmplan.runtime.health.probes import overflow_values, robustness_values
from mmplan.runtime.health.readings import Reading, rank_file, write_header, write_readings
from mmplan.runtime.health.replay import Call, in_forward
from mmplan.runtime.health.rules import chosen_rules
from mmplan.runtime.health.settings import DEFAULT_INTERVAL, ScalarWriter, Settings
from mmplan.runtime.health.shared_uses import SharedUses
from mmplan.runtime.health.silence import silence
from mmplan.runtime.health.taps import Taps

_MOST_TRACES = 3  # steps in which what is no number is followed; by then it is everywhere


def attach(
    model: nn.Module,
    *,
    modalities: Mapping[str, str] | None = None,
    branches: Mapping[str, str] | None = None,
    embeddings: Mapping[str, str] | None = None,
    cross_attention: Sequence[str] = (),
    keys: Mapping[str, str] | None = None,
    shared: Sequence[str] = (),
    file: Path | str | None = None,
    writer: ScalarWriter | None = None,
    interval: int = DEFAULT_INTERVAL,
    warmup_steps: int = 0,
    groups: Groups | None = None,
    limits: Mapping[str, float] | None = None,
    fires: Mapping[str, Literal["above", "below"]] | None = None,
    head_shards: int = 1,
    mitigation: float | None = None,
    averaged: bool = True,
    logits: Callable[[Any], Tensor | None] | None = None,
) -> "Health":
    """Watch a model while it is trained.

    Args:
        model: DDP and torch.compile are looked through; FSDP2 and DTensor parameters are understood.
        modalities: modality -> its module; default: by the names of the model's modules.
        branches: modality -> the module whose output goes to the fusion, such as a projector or the table of tokens;
            default: those of `modalities`, or by names where these are.
        embeddings: of two modalities, the image first: modality -> module whose output [n, ..., d] is the embedding of
            each sample (mean over what stands between). JED, CMRC, drift and robustness need it.
        cross_attention: modules that attend from one modality to another, in order.
        keys: modality -> module whose output [..., heads * d] are its keys or values.
        shared: modules that run once for each modality with the same weights; shared parameters are found by
        themselves.
        file: readings as JSON lines; replaced. Rank r > 0 writes beside it.
        writer: gets each reading as a scalar `health/MONITOR/OF`, such as TensorBoard's SummaryWriter.
        interval: optimizer steps between sampled ones.
        warmup_steps: steps before the first sampled one: what is untrained looks collapsed.
        groups: which ranks hold what; default: what a mesh of DTensor parameters tells (FSDP2, tensor parallelism).
        limits, fires: other limits and directions, by monitor.
        head_shards: on one rank, judge keys as if their heads were dealt out to so many.
        mitigation: scale the stronger of conflicting gradients of a shared parameter by this (0.3 is reported).
        averaged: replicas average gradients (DDP, FSDP) and do not sum them.
        logits: where the text output is in what the model returns; default: `logits`, as attribute or key.

    Raises:
        ValueError: the model has no such module, there is no such monitor, or an interval is below 1.
        OSError: the file cannot be written.
    """
    if interval < 1 or warmup_steps < 0 or head_shards < 1:
        raise ValueError(f"interval {interval} and head_shards {head_shards} are at least 1, warmup_steps at least 0")
    inner, compiled = _unwrapped(model)
    found = guessed_modalities(inner) if modalities is None else modalities
    if branches is None:
        branches = guessed_branches(inner, found) if modalities is None else found
    settings = Settings(
        modalities=dict(found),
        branches=dict(branches),
        embeddings=dict(embeddings or {}),
        cross_attention=tuple(cross_attention),
        keys=dict(keys or {}),
        shared=tuple(shared),
        rules=chosen_rules(limits, fires),
        groups=groups or found_groups(inner),
        file=None if file is None else Path(file),
        writer=writer,
        interval=interval,
        warmup_steps=warmup_steps,
        head_shards=head_shards,
        mitigation=mitigation,
        averaged=averaged,
        distributed=any(hasattr(p, "device_mesh") for p in inner.parameters()),
        compiled=compiled,
        logits=logits,
    )
    return Health(inner, settings, averaging=_averaging(model, settings))


def _unwrapped(model: nn.Module) -> tuple[nn.Module, bool]:
    """The model inside DDP and torch.compile, and whether that compiles any of it."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    whole = getattr(inner, "_orig_mod", None)  # what torch.compile(model) wraps
    inner = whole if isinstance(whole, nn.Module) else inner
    return inner, whole is not None or any(m._compiled_call_impl is not None for m in inner.modules())


def _averaging(model: nn.Module, settings: Settings) -> bool:
    is_averaged = isinstance(model, nn.parallel.DistributedDataParallel) or bool(fsdp_modules(model))
    return is_averaged and settings.groups.replicas is None


class Health:
    """The monitors of one model; a context that detaches them at its end. `readings` are those of this rank so far."""

    def __init__(self, model: nn.Module, settings: Settings, *, averaging: bool = False) -> None:
        """`averaging`: gradients are means over ranks that `settings.groups` does not name."""
        self._model, self._settings = model, settings
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._taps, self._uses = Taps(model, settings), SharedUses(model, settings)
        self._contributions = Contributions(model, settings, averaging=averaging)
        self._judge = Judge(settings.rules, self._rank)
        self._drifts = {name: EmbeddingDrift(learns=self._learns(path)) for name, path in settings.embeddings.items()}
        self._loss, self._dispersion = LossWatch(), PooledDispersion()
        self._losses: list[Tensor] = []
        self._seeds: list[Tensor] = []
        self._headroom: list[tuple[str, Tensor]] = []
        self._watched: list[Any] = []
        self._parameters: list[nn.Parameter] = []
        self._call: Call | None = None
        self._optimizers: WeakKeyDictionary[Optimizer, bool] = (
            WeakKeyDictionary()
        )  # whether they have parameters of ours
        self._again, self._traces, self._index = False, 0, 0
        # Forwards with DTensors talk to other ranks: if one runs again, all do.
        self._together = settings.distributed
        self.readings: list[Reading] = []
        self._file = None
        if settings.file is not None:
            self._file = rank_file(settings.file, self._rank).open("w")
            facts = {"mmplan_version": mmplan.__version__, "torch_version": torch.__version__}
            silent = silence(settings, averaging=averaging)
            asked = {"interval": settings.interval, "modalities": settings.modalities, "silent": silent}
            write_header(self._file, {**facts, "rank": self._rank, "pid": os.getpid(), **asked})
        self._handles = [
            model.register_forward_pre_hook(settings.hook(self._begin), with_kwargs=True),
            model.register_forward_hook(settings.hook(self._end)),
            register_optimizer_step_pre_hook(self._before_update),
            *(*self._taps.handles, *self._uses.handles),
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take all hooks off and close the file."""
        for handle in (*self._handles, *self._watched):
            handle.remove()
        self._handles, self._watched = [], []
        self._contributions.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def step(self) -> None:
        """The gradients of a step are there: take its readings. Called by hooks before an optimizer's step; collective
        where groups are given."""
        if self._call is None:
            return
        losses_sound, wrong = self._sound()
        if wrong:
            values = self._unsound(losses_sound=losses_sound)
        else:
            values = [*self._loss_value(), *(self._sampled() if self._taps.sampling else ())]
        found = [self._judge.reading(self._index, value) for value in values]
        self._keep([r for r, value in zip(found, values, strict=True) if self._tells(value)])
        self._index += 1
        self._clear()

    def _tells(self, value: Value) -> bool:
        groups = self._settings.groups
        if value.known == "rank":
            return True
        if value.known == "run" or groups.stages is None:
            return self._rank == 0
        return groups.first(of_all_stages=False)

    @property
    def _sampling(self) -> bool:
        settings = self._settings
        return self._index >= settings.warmup_steps and self._index % settings.interval == 0

    def _learns(self, path: str) -> bool:
        module = module_at(self._model, path, optional=self._settings.groups.stages is not None)
        return module is None or any(p.requires_grad for p in module.parameters())

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._again or not in_forward():
            return
        self._call = Call(args, kwargs)
        sampling = self._sampling
        self._taps.sampling = self._uses.sampling = sampling
        if sampling:
            self._contributions.begin()
        self._uses.begin()
        if sampling and not self._watched and not self._settings.compiled:  # hooks that change compile all anew
            for name, leaf in leaves(self._model):
                self._watched.append(leaf.register_forward_hook(self._look_for_headroom(name)))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._again or not in_forward():
            return
        found = loss_of(output)
        if found is None:
            return
        self._losses.append(found.detach())
        if found.requires_grad:
            found.register_hook(self._seeds.append)  # type: ignore[no-untyped-call]

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._optimizers:
            own = {id(parameter) for parameter in self._model.parameters()}
            held = (parameter for group in optimizer.param_groups for parameter in group["params"])
            self._optimizers[optimizer] = any(id(parameter) in own for parameter in held)
        if self._optimizers[optimizer]:
            self.step()

    def _look_for_headroom(self, name: str) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            if not self._again and in_forward():
                self._headroom += [(name, headroom(tensor)) for tensor in tensors_of(output)]

        return look

    def _sound(self) -> tuple[bool, bool]:
        """Whether all losses of this rank are numbers; whether a loss or a gradient is none: where ranks take readings
        together, of any of them."""
        sound = [torch.isfinite(value).all() for value in self._losses]
        losses_sound = all(sound) if not sound else bool(torch.stack(sound).all())
        if self._taps.sampling or not self._parameters:  # looking through all modules takes longer than their norms
            self._parameters = list(self._model.parameters())
        gradients = gradient_sound(self._parameters)
        wrong = not losses_sound or (gradients is not None and not bool(gradients))
        if self._together:
            wrong = largest([float(wrong)], dist.group.WORLD)[0] > 0
        elif self._taps.sampling:
            groups = self._settings.groups
            for group in (groups.replicas, groups.shards, groups.stages):
                wrong = largest([float(wrong)], group)[0] > 0
        return losses_sound, wrong

    def _unsound(self, *, losses_sound: bool) -> list[Value]:
        """Where what is no number began."""
        symptom = [] if losses_sound else [Value(loss.RULE.monitor, "loss", math.nan, {"loss": "no number"}, "rank")]
        self._traces += 1
        if self._traces > _MOST_TRACES or self._call is None:
            return symptom
        self._again = True
        try:
            seed = float(self._seeds[-1].detach().float().mean()) if self._seeds else 1.0
            traced = overflow_values(self._model, self._call, self._settings, seed, backward=not self._together)
            return [*traced, *symptom]
        finally:
            self._again = False

    def _loss_value(self) -> list[Value]:
        if not self._losses:
            return []
        mean = float(torch.stack([value.float().mean() for value in self._losses]).mean())
        rise = self._loss.update(mean)
        rule = self._settings.rules[loss.RULE.monitor]
        if rise is None or not (self._taps.sampling or (rise.counts and rule.beyond(rise.evidence))):
            return []
        return [rise.value(mean)]

    def _sampled(self) -> list[Value]:
        taps, settings = self._taps, self._settings
        values = [
            *statistics.stale(taps),
            *statistics.alignment(taps, settings, self._drifts, self._dispersion, self._index),
            *statistics.attention(taps, settings),
            *statistics.gradient_shares(self._model, taps, settings),
            *statistics.conflicts(self._uses),
            *statistics.key_value_shift(taps, settings),
            *self._contributions.values(),
            *self._headrooms(),
        ]
        if self._call is not None and settings.embeddings:
            self._again = True
            try:
                values += robustness_values(self._model, self._call, settings, self._index)
            finally:
                self._again = False
        return values

    def _headrooms(self) -> list[Value]:
        """Of the module that is nearest to the end of its type."""
        if not self._headroom:
            return []
        parts = torch.stack([value.to(self._headroom[0][1].device) for _, value in self._headroom])
        name = self._headroom[int(parts.argmax())][0]
        detail: dict[str, float | str | None] = {"modality": modality_of(name, self._settings.places)}
        return [Value(HEADROOM_RULE.monitor, name, float(parts.max()), detail, "rank")]

    def _keep(self, found: list[Reading]) -> None:
        self.readings += found
        if self._file is not None:
            write_readings(self._file, found)
        if self._settings.writer is not None:
            for reading in found:
                value = float("nan") if reading.value is None else reading.value
                self._settings.writer.add_scalar(f"health/{reading.monitor}/{reading.of}", value, reading.step)

    def _clear(self) -> None:
        self._taps.clear()
        self._uses.clear()
        self._contributions.clear()
        for handle in self._watched:
            handle.remove()
        self._watched, self._headroom, self._losses, self._seeds, self._call = [], [], [], [], None


def loss_of(output: Any) -> Tensor | None:
    """The loss in what a model returns: `loss` by key or attribute, a tensor of one number, or the first of a tuple."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None and isinstance(output, tuple) and output:
        found = output[0]
    found = output if found is None else found
    return found if isinstance(found, Tensor) and found.is_floating_point() and found.numel() == 1 else None
