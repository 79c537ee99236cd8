"""Hooks on named modules that keep, in sampled steps, what the monitors measure; in other steps they return at once."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from mmplan.runtime.health.key_values import Spread, head_parts, spread
from mmplan.runtime.health.overflow import tensors_of
from mmplan.runtime.health.placed import local, square_sum, whole
from mmplan.runtime.health.places import module_at
from mmplan.runtime.health.replay import in_forward
from mmplan.runtime.health.settings import Settings
from mmplan.runtime.health.staleness import Ledger

_QUERY = ("query", "hidden_states")
_KEY = ("key", "encoder_hidden_states", "key_value_states", "cross_attention_states")
_MOST_MATRICES = 8  # a spectrum is taken of, in a pass
_MOST_PASSES = 8


class Taps:
    """`sampling` switches them. Lists hold one entry a forward; gradients are sums of squares by place."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self._settings = settings
        self.sampling = False
        self.ledger = Ledger()
        self.clear()
        self.handles: list[Any] = []
        hook = settings.hook

        def at(path: str) -> list[nn.Module]:
            module = module_at(model, path, optional=settings.lacking)
            return [] if module is None else [module]

        for modality, path in settings.branches.items():
            self.handles += [m.register_forward_hook(hook(self._boundary(modality))) for m in at(path)]
        for modality, path in settings.embeddings.items():
            self.handles += [m.register_forward_hook(hook(self._embedding(modality))) for m in at(path)]
        for modality, path in settings.keys.items():
            self.handles += [m.register_forward_hook(hook(self._keys(modality))) for m in at(path)]
        for path in settings.cross_attention:
            for m in at(path):
                self.handles.append(m.register_forward_pre_hook(hook(self._inputs(path)), with_kwargs=True))
                self.handles.append(m.register_forward_hook(hook(self._weights(path)), with_kwargs=True))

    def clear(self) -> None:
        self.embeddings: dict[str, list[Tensor]] = {}
        self.attention: list[Tensor] = []  # a pass, [matrices, queries, keys]
        self.flows: dict[str, dict[str, Tensor]] = {}  # place -> side -> sum of squared gradients
        self.spreads: dict[str, list[Spread]] = {}  # by part of the heads
        self.lags: dict[str, int] = {}

    def _boundary(self, modality: str) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            made = next(tensors_of(output), None)
            if made is None or not in_forward():
                return
            if self._settings.cross_attention:
                self.ledger.made(modality, made)
            # All that it returns: some models use an inner state. What nobody uses gets no gradient, and counts as 0.
            for tensor in tensors_of(output) if self.sampling else ():
                if tensor.requires_grad:
                    self.flows.setdefault("branches", {}).setdefault(modality, torch.zeros((), device=tensor.device))
                    scale = square_sum([tensor]) / max(1, tensor.numel())
                    tensor.register_hook(self._add_square("branches", modality, scale))  # type: ignore[no-untyped-call]

        return look

    def _embedding(self, modality: str) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            made = next(tensors_of(output), None)
            if self.sampling and made is not None and in_forward():
                self.embeddings.setdefault(modality, []).append(pooled(made))

        return look

    def _keys(self, modality: str) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            made = next(tensors_of(output), None)
            if self.sampling and made is not None and in_forward():
                parts = [spread(part) for part in head_parts(local(made), self._settings.head_shards)]
                before = self.spreads.get(modality)
                self.spreads[modality] = (
                    parts if before is None else [a + b for a, b in zip(before, parts, strict=True)]
                )

        return look

    def _inputs(self, path: str) -> Any:
        """Both sides go on as views of their own, so that only the gradient through this attention is counted."""

        def look(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not (self.sampling and in_forward()):
                return None
            query, key = sides(args, kwargs)
            if query is None or key is None or query is key:
                return None
            for modality in self._settings.branches:
                lag = self.ledger.lag(modality, key)
                if lag is not None:
                    self.lags[modality] = max(lag, self.lags.get(modality, 0))
            views = {id(t): t.view_as(t) for t in (query, key)}
            for tensor, side in ((query, "query"), (key, "key")):
                view = views[id(tensor)]
                if view.requires_grad:
                    view.register_hook(self._add_square(path, side))  # type: ignore[no-untyped-call]
                else:  # nothing of the loss ever comes back here
                    self.flows.setdefault(path, {}).setdefault(side, torch.zeros((), device=view.device))
            return tuple(views.get(id(a), a) for a in args), {k: views.get(id(a), a) for k, a in kwargs.items()}

        return look

    def _weights(self, path: str) -> Any:
        return lambda module, args, kwargs, output: self._take_weights(path, module, args, kwargs, output)

    def _take_weights(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not (self.sampling and in_forward()):
            return
        weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if not isinstance(weights, Tensor) or weights.dim() < 3:
            query, key = sides(args, kwargs)
            known = isinstance(module, nn.MultiheadAttention) and query is not None and key is not None
            weights = attention_weights(module, query, key) if known else None  # type: ignore[arg-type]
        if weights is not None and path == self._settings.cross_attention[-1] and len(self.attention) < _MOST_PASSES:
            self.attention.append(self._some(local(weights)))

    def _some(self, weights: Tensor) -> Tensor:
        """Of attention weights [..., queries, keys] all heads of the first samples, as many as one rank with all heads
        would take."""
        if weights.dim() == 3:  # of no head of its own
            return weights[:_MOST_MATRICES]
        shards = self._settings.groups.shards
        heads = weights.shape[-3] * (1 if shards is None else dist.get_world_size(shards))
        rows = weights.flatten(0, -4) if weights.dim() > 4 else weights
        return rows[: max(1, _MOST_MATRICES // heads)].flatten(0, 1)

    def _add_square(self, place: str, side: str, scale: Tensor | float = 1.0) -> Callable[[Tensor], None]:
        def add(gradient: Tensor) -> None:
            square = square_sum([gradient]) * scale
            sums = self.flows.setdefault(place, {})
            sums[side] = sums[side] + square if side in sums else square

        return add


def sides(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    """What asks and what is asked in a cross-attention."""

    def find(names: tuple[str, ...], place: int) -> Tensor | None:
        for name in names:
            value = kwargs.get(name)
            if isinstance(value, Tensor):
                return value
        value = args[place] if len(args) > place else None
        return value if isinstance(value, Tensor) else None

    return find(_QUERY, 0), find(_KEY, 1)


def pooled(output: Tensor) -> Tensor:
    """[n, ..., d] as one vector a sample, the mean over what stands between."""
    flat = whole(output).float()
    return flat.flatten(1, -2).mean(1) if flat.dim() > 2 else flat


def attention_weights(module: nn.MultiheadAttention, query: Tensor, key: Tensor) -> Tensor:
    """Weights per head of a call that did not return them; without masks."""
    if module._qkv_same_embed_dim:
        assert module.in_proj_weight is not None
        of_query, of_key, _ = module.in_proj_weight.chunk(3)
    else:
        of_query, of_key = module.q_proj_weight, module.k_proj_weight
    biases = (None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[:2]
    if not module.batch_first and query.dim() == 3:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    with torch.no_grad():
        q, k = (
            functional.linear(x.detach(), w, b).view(*x.shape[:-1], module.num_heads, -1).transpose(-3, -2)
            for x, w, b in ((query, of_query, biases[0]), (key, of_key, biases[1]))
        )
        return torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1)
