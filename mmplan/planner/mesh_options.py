"""Ranks that modules apart can have beside a row of the search space, with what their stages take at least."""

from dataclasses import dataclass, replace

import numpy as np

from mmplan.cost_models.layout import Layout
from mmplan.planner.configuration import divisors
from mmplan.planner.contract import GroupGraph
from mmplan.planner.first_bounds import SAFE, busiest
from mmplan.planner.mesh_choices import Apart
from mmplan.planner.pricing import Prices
from mmplan.planner.problem import quickest_levels
from mmplan.planner.quantise import NS_PER_S
from mmplan.planner.upsets import BoolArray, IntArray

# Ways to take a row of each of several meshes that are looked at for one row of the others.
MOST_JOINED = 300_000


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Options:
    """Degrees of all meshes apart, one row each; [mesh, rows] `tp`, `cp`, `ep`, `dp`, `pp`. `ranks`: of all.
    `busiest_ns`: some stage of theirs takes at least so long; [edge, rows] `up_ns`: the heaviest path up to the start
    of each edge to other modules. `missing_ns`: options that are left out have a busiest stage of at least that."""

    tp: IntArray
    cp: IntArray
    ep: IntArray
    dp: IntArray
    pp: IntArray
    ranks: IntArray
    busiest_ns: IntArray
    up_ns: IntArray
    missing_ns: int | None = None

    def degrees(self, place: int) -> list[tuple[int, int, int, int, int]]:
        """tp, cp, ep, dp and pp of each mesh in a row."""
        columns = (of[:, place].tolist() for of in (self.tp, self.cp, self.ep, self.dp, self.pp))
        return list(zip(*columns, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Priced:
    """Of one width and number of samples: [stages - 1] the busiest stage, [edge] the path to its start, else 0."""

    busiest_ns: IntArray
    up_ns: IntArray


class MeshOptions:
    """The meshes of one choice.

    Args:
        apart: modules and allowed degrees of each mesh.
        sides: prices and groups of each.
        ends: (mesh, group of it) that each edge to the other modules leaves.
    """

    def __init__(
        self, apart: tuple[Apart, ...], sides: tuple[tuple[Prices, GroupGraph], ...], ends: tuple[tuple[int, int], ...]
    ) -> None:
        self._apart, self._sides, self._ends = apart, sides, ends
        self._priced: dict[tuple[int, tuple[int, int, int], int], _Priced] = {}
        self._known: dict[tuple[int, int], Options] = {}

    def of(self, samples: int, left: int) -> Options:
        """All that fit.

        Args:
            samples: of a microbatch in all replicas together.
            left: devices that these leave.
        """
        key = (samples, left)
        if key not in self._known:
            alone = [self._alone(mesh, *key) for mesh in range(len(self._apart))]
            self._known[key] = alone[0] if len(alone) == 1 else _joined(alone, left)
        return self._known[key]

    def _alone(self, mesh: int, samples: int, left: int) -> Options:
        """Those of one mesh."""
        apart, most = self._apart[mesh], len(self._sides[mesh][1].groups)
        rows = [
            (width, wide, min(most, left // ranks))
            for wide in divisors(samples)
            if not apart.dp or wide in apart.dp
            for width in apart.widths
            if (ranks := width[0] * width[1] * wide) <= left and ranks % width[2] == 0
        ]
        parts, busiest_ns = [np.zeros((5, 0), dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        up_ns = [np.zeros((len(self._ends), 0), dtype=np.int64)]
        for width, wide, stages in rows:
            priced = self._price(mesh, width, samples // wide)
            pp = np.array([n for n in range(1, stages + 1) if not apart.pp or n in apart.pp], dtype=np.int64)
            parts.append(np.stack([*(np.full_like(pp, degree) for degree in (*width, wide)), pp]))
            busiest_ns.append(priced.busiest_ns[pp - 1])
            up_ns.append(np.repeat(priced.up_ns[:, None], len(pp), axis=1))
        tp, cp, ep, wides, pps = np.concatenate(parts, axis=1)[:, None]
        return Options(
            tp=tp,
            cp=cp,
            ep=ep,
            dp=wides,
            pp=pps,
            ranks=(tp * cp * wides * pps)[0],
            busiest_ns=np.concatenate(busiest_ns),
            up_ns=np.concatenate(up_ns, axis=1),
        )

    def _price(self, mesh: int, width: tuple[int, int, int], samples: int) -> _Priced:
        """At the quickest level of recomputation, in the quickest pool, with no state sharded."""
        key = (mesh, width, samples)
        if key not in self._priced:
            (prices, groups), own = self._sides[mesh], self._apart[mesh].mesh(*width, 1)
            layout = Layout(tp=own.tp, cp=own.cp, ep=own.ep, spread=own.spread, patches=own.patches)
            costs, levels = prices.costs, quickest_levels(prices.scenario)
            pools = range(len(prices.scenario.cluster.pools))
            loads = prices.loads(samples)
            known: dict[int, float] = {}
            alike = prices.alike_at(*levels)
            for like, layer in zip(alike, prices.kinds, strict=True):
                if like not in known:
                    ways = [replace(layout, recompute=level, pools=(pool,)) for level in levels for pool in pools]
                    load = loads[layer.module]
                    known[like] = min(costs.forward_s(layer, load, x) + costs.backward_s(layer, load, x) for x in ways)
            member = prices.members(groups).astype(np.float64)
            group_s = member @ np.array([known[like] for like in alike])
            path_s = group_s.copy()
            for producer, consumer in sorted(groups.pairs, key=lambda pair: pair[1]):
                path_s[consumer] = max(path_s[consumer], group_s[consumer] + path_s[producer])
            busiest_s = busiest(group_s[None, None], member, len(groups.groups))[0, 0]
            up_s = np.array([path_s[group] if owner == mesh else 0.0 for owner, group in self._ends])
            scale = NS_PER_S * SAFE
            self._priced[key] = _Priced(
                busiest_ns=(busiest_s * scale).astype(np.int64), up_ns=(up_s * scale).astype(np.int64)
            )
        return self._priced[key]


def _joined(alone: list[Options], left: int) -> Options:
    """Every way to take one row of each mesh; the quickest rows alone where these are too many."""
    most = max(1, int(MOST_JOINED ** (1 / len(alone))))
    missing: list[int] = []
    kept = []
    for one in alone:
        order = np.argsort(one.busiest_ns, kind="stable")
        if len(order) > most:
            missing.append(int(one.busiest_ns[order[most]]))
        kept.append(order[:most])
    places: list[IntArray] = [grid.ravel() for grid in np.meshgrid(*kept, indexing="ij")]
    tp, cp, ep, dp, pp = (
        np.stack([getattr(one, name)[0, rows] for one, rows in zip(alone, places, strict=True)])
        for name in ("tp", "cp", "ep", "dp", "pp")
    )
    ranks = (tp * cp * dp * pp).sum(axis=0)
    fits: BoolArray = ranks <= left
    places = [rows[fits] for rows in places]
    return Options(
        tp=tp[:, fits],
        cp=cp[:, fits],
        ep=ep[:, fits],
        dp=dp[:, fits],
        pp=pp[:, fits],
        ranks=ranks[fits],
        busiest_ns=np.stack([one.busiest_ns[rows] for one, rows in zip(alone, places, strict=True)]).max(axis=0),
        up_ns=np.sum([one.up_ns[:, rows] for one, rows in zip(alone, places, strict=True)], axis=0),
        missing_ns=min(missing, default=None),
    )
