"""Configurations in which some modules have ranks of their own, the one with the least lower bound first.

The other modules run on a *row* of the search space, which has fewer devices than the cluster. Rows are bounded by the
work of their own modules alone, all at once; in that order blocks of them meet every mesh that fits beside them:

    (m - 1) * busiest stage of any mesh + path through modules apart and row + least finish of the row

and are sharpened under memory, first the row (`lower_bounds`), then a mesh beside it when its turn comes. Before the
first mesh the row's own cut is solved: where even that is not below the best plan, no mesh beside it is looked at.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from mmplan.planner.bounds import NEVER, lower_bounds
from mmplan.planner.by_devices import least_by_devices
from mmplan.planner.configuration import MOST_FORWARDS, Configuration
from mmplan.planner.configurations import Configurations
from mmplan.planner.first_bounds import SAFE, first_bounds
from mmplan.planner.mesh_choices import Apart
from mmplan.planner.mesh_options import MeshOptions, Options
from mmplan.planner.mesh_problem import MeshedGroups
from mmplan.planner.mesh_row_times import row_times
from mmplan.planner.mesh_rows import first_ranks, taken, without
from mmplan.planner.objective import Scale
from mmplan.planner.pricing import Prices
from mmplan.planner.problem import build_problem, devices_per_node
from mmplan.planner.quantise import NS_PER_S
from mmplan.planner.stage_order import tail_start
from mmplan.planner.stage_solver import solve_cut
from mmplan.planner.stopping import never
from mmplan.planner.upsets import IntArray, enumerate_upsets

# Rows that meet their meshes at once: few at first, as the first ones often decide.
FIRST_BLOCK, LARGEST_BLOCK = 64, 1024
CELLS = 2_000_000  # rows x meshes looked at together


@dataclass(frozen=True, kw_only=True, slots=True)
class Meshed:
    """One configuration, its proven bound, and a floor of its busiest stage."""

    configuration: Configuration
    step_ns: int
    busiest_ns: int


@dataclass(kw_only=True, slots=True, eq=False)
class _Row:
    """A row beside its meshes that may be worth solving, those with the least bound first: `option` of `options`."""

    row: int
    base: Configuration
    options: Options
    option: IntArray
    step_ns: IntArray
    busiest_ns: int
    turn: int = 0


@dataclass(slots=True)
class Tally:
    """Rows looked at, configurations met, and of these the ones that memory excludes."""

    met: int = 0
    out_of_memory: int = 0


class MeshFrontier:
    """Those of one choice of modules apart; under any schedule none on some devices at least has a step below that of
    `any_order_by_devices`.

    Args:
        prices: of the whole model.
        configurations: rows; spread modules among those apart do not matter.
        stop: asked before anything is looked at closer, and while single rows are solved.
    """

    def __init__(
        self,
        prices: Prices,
        configurations: Configurations,
        scale: Scale,
        apart: tuple[Apart, ...],
        meshed: MeshedGroups,
        stop: Callable[[], bool] = never,
    ) -> None:
        self.meshed, self.tally = meshed, Tally()
        self._prices, self._scale, self.apart = prices, scale, apart
        self._cluster = prices.scenario.cluster
        names = {name for one in apart for name in one.modules}
        rest = frozenset(module.name for module in prices.scenario.model.modules if module.name not in names)
        self._own, (self._groups, _) = prices.among(rest), meshed.parts[-1]
        self._rows = without(configurations, names)
        self._ranks = self._rows.ranks
        turn = {group: place for _, kept in meshed.parts for place, group in enumerate(kept)}
        last = len(apart)
        crossing = [
            ((meshed.mesh_of[u], turn[u]), turn[v])
            for u, v in meshed.groups.ends
            if meshed.mesh_of[u] < last == meshed.mesh_of[v]
        ]
        upsets = enumerate_upsets(len(self._groups.groups), self._groups.pairs)
        assert upsets is not None  # fewer than those of `meshed`
        self._upsets, self._stop = upsets, stop
        self._starts = tuple(target for _, target in crossing)
        self._in_a_row = tail_start(len(self._groups.groups), self._groups.pairs) == 0
        self._options = MeshOptions(
            apart,
            tuple(
                (prices.among(frozenset(one.modules)), groups)
                for one, (groups, _) in zip(apart, meshed.parts, strict=False)
            ),
            tuple(source for source, _ in crossing),
        )
        self._floors: dict[tuple[object, ...], int] = {}
        self._heap: list[tuple[int, int, _Row | Meshed]] = []
        self._pushed = 0
        self._dropped = NEVER  # least value of what was not below the cutoff when it was met
        self._position, self._block = 0, FIRST_BLOCK
        self._look()

    def least_value(self, cutoff: int) -> int:
        """No configuration left has a lower one; those of at least `cutoff`, which never grows, may be forgotten."""
        self._advance(cutoff)
        return self.known_value()

    def known_value(self) -> int:
        """The same without looking closer at anything."""
        blunt = int(self._values[self._position]) if self._position < len(self._values) else NEVER
        return min(self._heap[0][0] if self._heap else NEVER, blunt, self._dropped)

    @property
    def any_order_value(self) -> int:
        """Under any schedule none has a lower one."""
        found = self.any_order_by_devices.items()
        return min((self._scale.value_on(ranks, step_ns) for ranks, step_ns in found), default=NEVER)

    def pop(self, cutoff: int) -> Meshed | None:
        """The next configuration, None where none is left below the cutoff."""
        self._advance(cutoff)
        if not self._heap or self._heap[0][0] >= cutoff or not isinstance(self._heap[0][2], Meshed):
            return None
        found = heappop(self._heap)[2]
        assert isinstance(found, Meshed)
        return found

    def _look(self) -> None:
        """The first look at all rows."""
        rows, devices = self._rows, self._cluster.device_count
        fits = (self._ranks + len(self.apart) <= devices) & (rows.pp <= len(self._groups.groups))
        chosen = np.flatnonzero(fits)
        times = self._times = row_times(self._own, self._groups, rows, chosen, self._starts)
        base, size = rows.base[chosen], np.searchsorted(times.sizes, rows.microbatch_size[chosen])
        step_s = (rows.microbatches[chosen] - 1) * times.busiest_s[base, size, rows.pp[chosen] - 1]
        step_s += times.path_s[base, size]
        step_ns = np.minimum(step_s * (NS_PER_S * SAFE), NEVER).astype(np.int64)
        values = self._scale.values_on(self._ranks[chosen] + len(self.apart), step_ns)
        order = np.argsort(values, kind="stable")
        order = order[values[order] < NEVER]
        self._order, self._values = chosen[order], values[order]
        # whatever their order, the ranks of a row have all microbatches of its modules
        alone_s = rows.microbatches[chosen] * times.busiest_s[base, size, rows.pp[chosen] - 1]
        alone_ns = np.minimum(alone_s * (NS_PER_S * SAFE), NEVER).astype(np.int64)
        self.any_order_by_devices = least_by_devices(self._ranks[chosen] + len(self.apart), alone_ns)

    def _advance(self, cutoff: int) -> None:
        """Until the least one is a sharp configuration, or not below the cutoff, or it is to stop."""
        while not self._stop():
            top = self._heap[0][0] if self._heap else NEVER
            blunt = int(self._values[self._position]) if self._position < len(self._values) else NEVER
            if min(top, blunt) >= cutoff:
                return
            if blunt < top:
                block = self._order[self._position : self._position + self._block]
                self._position += len(block)
                self._block = min(2 * self._block, LARGEST_BLOCK)
                self._meet(block, cutoff)
            elif isinstance(self._heap[0][2], Meshed):
                return
            else:
                self._sharpen(heappop(self._heap)[2], cutoff)

    def _meet(self, block: IntArray, cutoff: int) -> None:
        """Put the rows of a block beside their meshes."""
        rows, devices = self._rows, self._cluster.device_count
        worth: list[tuple[int, Options, IntArray]] = []
        by_key: dict[tuple[int, int], list[int]] = {}
        for row in block.tolist():
            samples, left = int(rows.dp[row]) * int(rows.microbatch_size[row]), devices - int(self._ranks[row])
            by_key.setdefault((samples, left), []).append(row)
        for key, members in by_key.items():
            options = self._options.of(*key)
            self.tally.met += len(members) * len(options.ranks)
            if options.missing_ns is not None:
                self._drop(np.array([(int(rows.microbatches[row]) - 1) * options.missing_ns for row in members]))
            if not len(options.ranks):
                continue
            step = max(1, CELLS // len(options.ranks))
            for start in range(0, len(members), step):
                some = np.array(members[start : start + step], dtype=np.int64)
                values = self._scale.values_on(
                    self._ranks[some][:, None] + options.ranks, self._blunt_ns(some, options)
                )
                least = values.min(axis=1)
                self._drop(least[least >= cutoff])
                worth += [(int(some[place]), options, values[place]) for place in np.flatnonzero(least < cutoff)]
        if worth:
            self._sharpen_rows(self._may_fit(worth, cutoff), cutoff)

    def _may_fit(self, worth: list[tuple[int, Options, IntArray]], cutoff: int) -> list[tuple[int, Options, IntArray]]:
        """Those that the first look under memory leaves, which is cheap for many rows at once."""
        if len(worth) <= FIRST_BLOCK:
            return worth
        first = first_bounds(self._own, self._groups, taken(self._rows, np.array([row for row, _, _ in worth])))
        kept = []
        for place, (row, options, values) in enumerate(worth):
            step_ns = int(first.step_ns[place])
            if step_ns == NEVER:
                self.tally.out_of_memory += len(options.ranks)
                continue
            value = self._scale.value_on(int(self._ranks[row]) + int(options.ranks.min()), step_ns)
            if value < cutoff:
                kept.append((row, options, values))
            else:
                self._drop(np.array([value]))
        return kept

    def _blunt_ns(self, some: IntArray, options: Options) -> IntArray:
        """[rows, options] from the first look."""
        rows, times, scale = self._rows, self._times, NS_PER_S * SAFE
        base, size = rows.base[some], np.searchsorted(times.sizes, rows.microbatch_size[some])
        own_ns = (times.busiest_s[base, size, rows.pp[some] - 1] * scale).astype(np.int64)
        path_ns = (times.path_s[base, size] * scale).astype(np.int64)[:, None]
        down_ns = (times.down_s[base, size] * scale).astype(np.int64)
        for edge in range(len(self._starts)):
            path_ns = np.maximum(path_ns, options.up_ns[edge] + down_ns[:, edge, None])
        repeats = (rows.microbatches[some].astype(np.int64) - 1)[:, None]
        found: IntArray = repeats * np.maximum(own_ns[:, None], options.busiest_ns) + path_ns
        return found

    def _sharpen_rows(self, worth: Sequence[tuple[int, Options, IntArray]], cutoff: int) -> None:
        """Bounds of the rows under memory; what is still worth it waits in the heap, a row at its best mesh's place."""
        if not worth:
            return
        bases = [self._cheapest_way(self._rows[row]) for row, _, _ in worth]
        sharp = lower_bounds(self._own, self._groups, bases)
        for place, ((row, options, _), base) in enumerate(zip(worth, bases, strict=True)):
            step_ns, busiest_ns = int(sharp.step_ns[place]), int(sharp.busiest_ns[place])
            if step_ns == NEVER:
                self.tally.out_of_memory += len(options.ranks)
                continue
            repeats = base.microbatches - 1
            once_ns = step_ns - repeats * busiest_ns
            path_ns = np.full(len(options.ranks), once_ns, dtype=np.int64)
            size = int(np.searchsorted(self._times.sizes, base.microbatch_size))
            down_ns = (self._times.down_s[self._rows.base[row], size] * (NS_PER_S * SAFE)).astype(np.int64)
            for edge, start in enumerate(self._starts):
                behind_ns = once_ns if self._in_a_row and start == 0 else int(down_ns[edge])
                path_ns = np.maximum(path_ns, options.up_ns[edge] + behind_ns)
            steps_ns = repeats * np.maximum(busiest_ns, options.busiest_ns) + path_ns
            allowed = self._allowed(base, options)
            values = np.where(allowed, self._scale.values_on(base.ranks + options.ranks, steps_ns), NEVER)
            option = np.argsort(values, kind="stable")
            self._drop(values[(values >= cutoff) & allowed])
            option = option[: int((values < cutoff).sum())]
            if len(option):
                found = _Row(
                    row=row, base=base, options=options, option=option, step_ns=steps_ns, busiest_ns=busiest_ns
                )
                self._push(int(values[option[0]]), found)

    def _allowed(self, base: Configuration, options: Options) -> NDArray[np.bool_]:
        """[options] by the number of all stages."""
        stages, allowed = base.pp + options.pp.sum(axis=0), self._prices.scenario.constraints.pp
        fits: NDArray[np.bool_] = stages * base.microbatches <= MOST_FORWARDS
        return fits & np.isin(stages, allowed) if allowed else fits

    def _cheapest_way(self, row: Configuration) -> Configuration:
        """The row as part of a plan whose transfers cost least: in one node, or over several where that is quicker."""
        if row.ranks > devices_per_node(self._cluster):
            return row
        near, far = (
            min(self._own.lags_s(self._groups.edges, row.layout, row.microbatch_size, way), default=0.0)
            for way in (True, False)
        )
        return row if near <= far else replace(row, world=self._cluster.device_count)

    def _sharpen(self, waiting: "_Row | Meshed", cutoff: int) -> None:
        """The next mesh of a row under memory, and the row at the place of the one behind it."""
        assert isinstance(waiting, _Row)
        if waiting.turn == 0 and not self._alone_worth(waiting, cutoff):
            return
        base, options, place = waiting.base, waiting.options, int(waiting.option[waiting.turn])
        waiting.turn += 1
        if waiting.turn < len(waiting.option):
            behind = int(waiting.option[waiting.turn])
            ranks = base.ranks + int(options.ranks[behind])
            self._push(self._scale.value_on(ranks, int(waiting.step_ns[behind])), waiting)
        floors = [self._floor(mesh, base, options, place) for mesh in range(len(self.apart))]
        if NEVER in floors:
            self.tally.out_of_memory += 1
            return
        before_ns = max(waiting.busiest_ns, int(options.busiest_ns[place]))
        busiest_ns = max(waiting.busiest_ns, *floors)
        step_ns = int(waiting.step_ns[place]) + (base.microbatches - 1) * max(0, busiest_ns - before_ns)
        for configuration in self._placed(base, options, place):
            value = self._scale.value_of(configuration, step_ns)
            if value < cutoff:
                self._push(value, Meshed(configuration=configuration, step_ns=step_ns, busiest_ns=busiest_ns))
            else:
                self._drop(np.array([value]))

    def _alone_worth(self, waiting: _Row, cutoff: int) -> bool:
        """Whether the modules of a row have a cut below the cutoff with nothing beside them; a row without is dropped
        with all of its meshes."""
        ranks = waiting.base.ranks + int(waiting.options.ranks.min())
        cutoff_ns = self._scale.step_below_on(ranks, cutoff) if cutoff < NEVER else None
        problem = build_problem(self._own, self._groups, waiting.base)
        found = solve_cut(problem, self._upsets, cutoff_ns=cutoff_ns, busiest_ns=waiting.busiest_ns, stop=self._stop)
        if found.stage_of is not None or found.exhausted:
            return True
        if cutoff_ns is None:
            self.tally.out_of_memory += len(waiting.option)
        else:
            self._drop(np.array([self._scale.value_on(ranks, found.bound_ns)]))
        return False

    def _floor(self, mesh: int, base: Configuration, options: Options, place: int) -> int:
        """The busiest stage of a mesh under memory at least; NEVER where nothing fits."""
        tp, cp, ep, dp, pp = options.degrees(place)[mesh]
        samples, own = base.microbatch_size * base.dp // dp, self.apart[mesh].mesh(tp, cp, ep, dp)
        sharded_over = dp if base.sharding != "none" else 1
        key = (mesh, tp, cp, ep, pp, samples, base.sharding, sharded_over, base.microbatches)
        if key not in self._floors:
            alone = Configuration(
                tp=tp,
                cp=cp,
                ep=ep,
                dp=dp,
                pp=pp,
                spread=own.spread,
                patches=own.patches,
                microbatch_size=samples,
                microbatches=base.microbatches,
                schedule=base.schedule,
                sharding=base.sharding,
            )
            prices, (groups, _) = self._prices.among(frozenset(self.apart[mesh].modules)), self.meshed.parts[mesh]
            sharp = lower_bounds(prices, groups, [alone])
            self._floors[key] = NEVER if sharp.step_ns[0] == NEVER else int(sharp.busiest_ns[0])
        return self._floors[key]

    def _placed(self, base: Configuration, options: Options, place: int) -> Iterator[Configuration]:
        """The configuration for every place that its meshes can have on the cluster."""
        sizes = options.degrees(place)
        for firsts in first_ranks(self._cluster, base.ranks, [(tp, cp * dp, pp) for tp, cp, _, dp, pp in sizes]):
            meshes = tuple(
                one.mesh(tp, cp, ep, dp, first)
                for one, (tp, cp, ep, dp, _), first in zip(self.apart, sizes, firsts, strict=True)
            )
            stages = tuple(pp for *_, pp in sizes)
            yield replace(base, world=0, pp=base.pp + sum(stages), meshes=meshes, mesh_stages=stages)

    def _push(self, value: int, waiting: "_Row | Meshed") -> None:
        self._pushed += 1
        heappush(self._heap, (value, self._pushed, waiting))

    def _drop(self, values: IntArray) -> None:
        self._dropped = min(self._dropped, int(values.min(initial=NEVER)))
