"""What one rank of `mmplan execute --health` sees: hooks on the layers, or on the user's own modules, that it holds."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from mmplan.cost_models.ops import Attention
from mmplan.planner.plan import Plan
from mmplan.runtime.batch import Microbatch
from mmplan.runtime.health import collapse
from mmplan.runtime.health.gradient_watch import GradientWatch
from mmplan.runtime.health.key_values import spread
from mmplan.runtime.health.overflow import headroom
from mmplan.runtime.health.seen import Rows, Seen
from mmplan.runtime.health.settings import Settings
from mmplan.runtime.health.taps import Taps
from mmplan.runtime.layers import LayerModule, OnAttention
from mmplan.runtime.train import RankStep
from mmplan.runtime.weighted_stage import WeightedStage

SCALED = "losses are scaled in fp16, one scale for each modality"
_MOST_ROWS = 256  # queries and keys of an attention that is looked at


class RankTaps:
    """Args: models: that hold the modules of `settings`, each some of them; layers: of built-in models, by id.

    `dealt`: modalities whose images or clips are dealt out to ranks that share layers; `paired`: rows of embeddings are
    samples, not tokens.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[WeightedStage],
        models: Sequence[nn.Module],
        settings: Settings,
        *,
        layers: Mapping[str, LayerModule],
        dealt: frozenset[str] = frozenset(),
        paired: bool = False,
    ) -> None:
        self._settings, self._width, self._dealt, self._paired = settings, plan.tp, dealt, paired
        self._taps = [Taps(model, settings) for model in models]
        self._outputs: list[tuple[str, Tensor]] = []
        self._attention: dict[str, list[Tensor]] = {}
        self._seen = Seen()
        self.sampling = False
        split = any("I" in order for order in plan.orders)
        summed_on = plan.dp * plan.cp if plan.sharding == "none" else 1
        watched = stages if variance_silence(plan) == "" else ()
        self._gradients = [GradientWatch(s, width=plan.tp, summed_on=summed_on, split=split) for s in watched]
        for stage in stages:
            stage.outputs.on_output = self._look
        for name, layer in layers.items():
            layer.on_attention = self._attend(name, layer.layer.module)

    def begin(self, step: int) -> None:
        settings = self._settings
        self.sampling = step >= settings.warmup_steps and (step - settings.warmup_steps) % settings.interval == 0
        for taps in self._taps:
            taps.clear()
            taps.sampling = self.sampling
        for gradients in self._gradients:
            gradients.begin(sampling=self.sampling)
        self._outputs, self._attention, self._seen = [], {}, Seen()

    def seen(self, done: RankStep) -> Seen | None:
        """Of the step behind it; None where it was not sampled."""
        if not self.sampling:
            return None
        found = self._seen
        if self._outputs:
            parts = torch.stack([value for _, value in self._outputs])
            found.headroom = float(parts.max()), self._outputs[int(parts.argmax())][0]
        for taps in self._taps:
            self._add(taps, found)
        for name, ratios in self._attention.items():
            found.attention_at = name
            found.ratios = [value for part in ratios for value in part[0].tolist()]
            found.effective_ranks = [value for part in ratios for value in part[1].tolist()]
        if self._gradients:
            found.squares = sum(gradients.square() for gradients in self._gradients)
            found.total_square = sum(gradients.total_square or 0.0 for gradients in self._gradients)
        found.timeline, found.asked_s = done.timeline, done.asked_s
        self.sampling = False
        return found

    def _add(self, taps: Taps, found: Seen) -> None:
        for place, sides in taps.flows.items():
            sums = found.flows.setdefault(place, {})
            for side, square in sides.items():
                share = 1.0 if side in self._dealt else 1 / self._width
                sums[side] = sums.get(side, 0.0) + float(square) * share
        for modality, parts in taps.embeddings.items():
            # Where other stages' modules stand in for theirs, what they make is no number.
            rows = torch.cat([part for part in parts if bool(part.isfinite().all())] or [torch.empty(0, 0)])
            if rows.numel():
                samples = rows.tolist() if self._paired else None
                found.embeddings[modality] = Rows(total=rows.sum(0).tolist(), count=float(len(rows)), rows=samples)
        for matrices in taps.attention:
            if bool(matrices.isfinite().all()):
                found.attention_at = self._settings.cross_attention[-1]
                found.ratios += collapse.spectral_ratio(matrices).tolist()
                found.effective_ranks += collapse.effective_rank(matrices).tolist()
        for modality, spreads in taps.spreads.items():
            for index, part in enumerate(spreads):
                if math.isfinite(part.squares):
                    found.keys[f"{modality}/{index}"] = part
        for modality, lag in taps.lags.items():
            found.lags[modality] = max(lag, found.lags.get(modality, 0))

    def _look(self, layer: str, output: Tensor) -> None:
        if self.sampling:
            self._outputs.append((layer, headroom(output)))

    def _attend(self, name: str, module: str) -> OnAttention:
        def look(op: Attention, q: Tensor, k: Tensor, batch: Microbatch) -> None:
            if not (self.sampling and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1):
                return
            with torch.no_grad():
                if self._width > 1:
                    own = self._seen.keys.get(f"{name}/0")
                    part = spread(k)
                    self._seen.keys[f"{name}/0"] = part if own is None else own + part
                if op.cross and len(self._attention.setdefault(name, [])) < 8:
                    matrices = _first_attention(op, q, k, batch, module)
                    if matrices is not None:
                        self._attention[name].append(
                            torch.stack([collapse.spectral_ratio(matrices), collapse.effective_rank(matrices)])
                        )

        return look


def _first_attention(op: Attention, q: Tensor, k: Tensor, batch: Microbatch, module: str) -> Tensor | None:
    """Weights of the first sequence, [heads, queries, keys]; None where it has no keys."""
    queries, keys = batch.lengths[module][:1], batch.context_lengths[module][:1]
    if not queries or not keys or not queries[0] or not keys[0]:
        return None
    of_query = _by_head(q[: min(queries[0], _MOST_ROWS)], op.heads)
    of_key = _by_head(k[: min(keys[0], _MOST_ROWS)], op.kv_heads)
    of_key = of_key.repeat_interleave(op.heads // op.kv_heads, dim=0)
    return torch.softmax((of_query @ of_key.transpose(1, 2)).float() / of_query.shape[-1] ** 0.5, dim=-1)


def _by_head(rows: Tensor, heads: int) -> Tensor:
    return rows.view(len(rows), heads, -1).transpose(0, 1)


def variance_silence(plan: Plan) -> str:
    """Why the variance of gradients is not read, "" where it is."""
    if "fp16" in plan.scenario.precisions:
        return SCALED
    if plan.ep > 1 or plan.meshes or plan.spread:
        return "experts, images or modules on ranks of their own: what a microbatch adds is not seen on one rank"
    if plan.batch_factor > 1:
        return "modules run several microbatches at once: what each of these adds is not seen"
    if plan.tp > 1 and plan.sharding != "none":
        return "sharded optimizer states of split layers do not say which weights several ranks have whole"
    return ""
