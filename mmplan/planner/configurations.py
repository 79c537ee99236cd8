"""All configurations of a scenario as columns: millions of them, each made when it is asked for."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from mmplan.cost_models.degrees import divides, heads_of, tp_degrees
from mmplan.cost_models.layout import Layout
from mmplan.cost_models.loads import mean_loads
from mmplan.cost_models.patches import patch_modules, read_by, row_changing
from mmplan.errors import InfeasibleError, InputError
from mmplan.planner.batch_factors import batch_factors
from mmplan.planner.configuration import CHUNKS, FEW_CHUNKS, MOST_FORWARDS, Configuration, divisors, why_empty
from mmplan.planner.undivided import undivided_by_tp, undivided_experts
from mmplan.scenario.scenario import Scenario, Transformer
from mmplan.scenario.schedule_names import ScheduleName, in_chunks_of
from mmplan.scenario.technique import SHARDINGS, Sharding

# Rows of a rank's mean sequence below which its matrix products have fewer than two tiles of 128 rows.
LEAST_ROWS = 256
MOST_CP = 64

Column = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Configurations(Sequence[Configuration]):
    """Configurations by index; `base` is an index into `bases` (tp, cp, ep, etp, spread, patches, together,
    batch_factor), `sharding` into SHARDINGS.

    `schedule` is that of one chunk per rank; several run as interleaved 1F1B.
    """

    bases: tuple[Layout, ...]
    schedule: ScheduleName
    base: Column
    sharding: Column
    dp: Column
    pp: Column
    microbatch_size: Column
    microbatches: Column
    vp: Column

    def __len__(self) -> int:
        return len(self.base)

    @overload
    def __getitem__(self, index: int) -> Configuration: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Configuration]: ...

    def __getitem__(self, index: int | slice) -> Configuration | Sequence[Configuration]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        base = self.bases[self.base[index]]
        return Configuration(
            tp=base.tp,
            cp=base.cp,
            ep=base.ep,
            etp=base.etp,
            spread=base.spread,
            patches=base.patches,
            together=base.together,
            batch_factor=base.batch_factor,
            sharding=SHARDINGS[self.sharding[index]],
            dp=int(self.dp[index]),
            pp=int(self.pp[index]),
            microbatch_size=int(self.microbatch_size[index]),
            microbatches=int(self.microbatches[index]),
            vp=int(self.vp[index]),
            schedule=self.schedule if self.vp[index] == 1 else "interleaved",
        )

    def of_bases(self, name: str) -> Column:
        """A degree of the bases (`tp`, `cp`, `ep`, `etp`), by index."""
        values: Column = np.array([getattr(base, name) for base in self.bases], dtype=np.int32)[self.base]
        return values

    @property
    def ranks(self) -> NDArray[np.int64]:
        """Devices of each."""
        width = self.of_bases("tp").astype(np.int64) * self.of_bases("cp")
        ranks: NDArray[np.int64] = width * self.dp * self.pp
        return ranks


def list_configurations(
    scenario: Scenario, groups: int, most_samples: Callable[[Layout], int] | None = None
) -> Configurations:
    """All that fit the cluster, the batch and the constraints, with at most `groups` stages.

    Several chunks per rank need so many microbatches as a multiple of the ranks (Narayanan et al., SC 2021, section
    2.2). GPipe takes as long as 1F1B in the closed form and holds at least as many activations, so it is listed only
    where the constraints exclude 1F1B; any other schedule is made afterwards, in the same memory. Stages x microbatches
    are at most `MOST_FORWARDS`.

    Args:
        most_samples: of a microbatch in a layout; larger ones are left out, but never the smallest.

    Raises:
        InfeasibleError: the constraints leave nothing; says which one.
    """
    bases = tuple(_bases(scenario))
    shardings = [SHARDINGS.index(one) for one in allowed_shardings(scenario)]
    most = [scenario.global_batch if most_samples is None else most_samples(base) for base in bases]
    known: dict[tuple[int, ...], _Cells] = {}
    parts = [
        (index, sharding, dp, cells)
        for index, base in enumerate(bases)
        for dp in _replicas(scenario, base)
        if len((cells := _cells(scenario, groups, base, dp, most[index], known)).pp)
        for sharding in _worth_sharding(scenario, base, dp, shardings)
    ]
    if not parts:
        raise InfeasibleError(why_empty(scenario, groups, sorted({base.tp for base in bases})))
    lengths = [len(cells.pp) for *_, cells in parts]
    base, sharding, dp = (
        np.repeat(np.array([part[column] for part in parts], dtype=np.int32), lengths) for column in range(3)
    )
    pp, size, count, vp = (np.concatenate([part[3][column] for part in parts]) for column in range(4))
    return Configurations(
        bases=bases,
        schedule="gpipe" if set(scenario.constraints.schedule) == {"gpipe"} else "1f1b",
        base=base,
        sharding=sharding,
        dp=dp,
        pp=pp,
        microbatch_size=size,
        microbatches=count,
        vp=vp,
    )


def allowed_shardings(scenario: Scenario) -> tuple[Sharding, ...]:
    """What the technique says where it says anything, else what the constraints allow; weights in host memory come with
    ZeRO-3 alone, as in DeepSpeed and FSDP.

    Raises:
        InfeasibleError: weights are to lie in host memory, and that sharding is excluded.
    """
    technique, rules = scenario.technique, scenario.constraints
    allowed = (technique.sharding,) if technique.sharding != "none" else rules.sharding or SHARDINGS
    if technique.offload != "parameters":
        return allowed
    if "parameters" not in allowed:
        raise InfeasibleError(
            f"weights in host memory (offload: parameters) need sharding: parameters, and this scenario has "
            f"{', '.join(allowed)} only"
        )
    return ("parameters",)


def allowed_chunks(scenario: Scenario) -> tuple[int, ...]:
    """Chunks per rank: up to four where constraints name none, and more where they name the interleaved schedule;
    several only where it is allowed, one where any other is."""
    rules = scenario.constraints
    names = in_chunks_of(rules.schedule, rules.vp)
    one = any(name != "interleaved" for name in names) if rules.schedule else not rules.vp or 1 in rules.vp
    several = not rules.schedule or "interleaved" in names
    wanted = rules.vp or (CHUNKS if "interleaved" in names else FEW_CHUNKS)
    chunks = tuple(vp for vp in wanted if (one if vp == 1 else several))
    return (1, *chunks) if one and 1 not in chunks else chunks  # two chunks of V-shaped schedules are made of one


def _bases(scenario: Scenario) -> Iterator[Layout]:
    rules, possible = scenario.constraints, tp_degrees(scenario)
    shards = [tp for tp in possible if not rules.tp or tp in rules.tp]
    if not shards:
        wanted, offered = (", ".join(map(str, values)) for values in (rules.tp, possible))
        why = next((why for tp in rules.tp if (why := undivided_by_tp(scenario, tp))), "")
        raise InfeasibleError(
            f"constraints.tp allows {wanted}, but only {offered} divide the heads, widths and nodes of this scenario"
            + (f": {why}" if why else "")
        )
    found, rows = False, mean_rows(scenario)
    batched = batch_factors(scenario)
    for tp in shards:
        for cp in context_degrees(scenario, tp, rows):
            for ep, etp in expert_degrees(scenario, tp):
                for spread, patches in _spreads(scenario, tp, cp):
                    found = True
                    base = Layout(tp=tp, cp=cp, ep=ep, etp=etp, spread=spread, patches=patches)
                    for together, factor in batched:
                        yield replace(base, together=together, batch_factor=factor)
    if not found:
        raise InfeasibleError(_why_no_base(scenario, shards))


def _why_no_base(scenario: Scenario, shards: Sequence[int]) -> str:
    rules = scenario.constraints
    free = replace(rules, cp=(), ep=(), etp=())
    unlimited, rows = replace(scenario, constraints=free), mean_rows(scenario)
    for name, wanted, offered in (
        ("cp", rules.cp, {cp for tp in shards for cp in context_degrees(unlimited, tp, rows)}),
        ("ep", rules.ep, {ep for tp in shards for ep, _ in expert_degrees(unlimited, tp)}),
        ("etp", rules.etp, {_shared_by(scenario, tp, *one) for tp in shards for one in expert_degrees(unlimited, tp)}),
    ):
        if wanted and not offered & set(wanted):
            some = ", ".join(map(str, sorted(offered)))
            why = _why_no_context(scenario, wanted, rows) if name == "cp" else ""
            if name != "cp" and (told := undivided_experts(scenario, wanted[0] if name == "ep" else 1)):
                why = f": {told}"
            return f"constraints.{name} allows {', '.join(map(str, wanted))}, and this scenario can have {some}{why}"
    return "constraints.spread names modules that no allowed tp can leave unsplit"


def mean_rows(scenario: Scenario) -> float:
    """Tokens of a mean sample in the language model that has the fewest; 0 where there is none."""
    loads = mean_loads(scenario, 1)
    return min((loads[m.name].tokens for m in scenario.model.modules if m.kind == "language_model"), default=0.0)


def context_degrees(scenario: Scenario, tp: int, rows: float) -> list[int]:
    """Context parallel degrees: powers of two that leave each rank `LEAST_ROWS` of the mean sequence's `rows`."""
    rules, found = scenario.constraints, []
    cp = 1
    while cp == 1 or (cp <= MOST_CP and rows >= LEAST_ROWS * cp):
        if cp > 1 and _has_state(scenario):  # it passes from rank to rank, which nothing here prices
            break
        exchanged = scenario.technique.context_parallel == "all-to-all" and cp > 1
        heads = [count for shape in _language_shapes(scenario) for _, count in heads_of(shape)]
        if (not rules.cp or cp in rules.cp) and not (exchanged and any(count % (tp * cp) for count in heads)):
            found.append(cp)
        cp *= 2
    return found


def _why_no_context(scenario: Scenario, wanted: Sequence[int], rows: float) -> str:
    """The arithmetic that leaves out the least degree that the constraints allow."""
    cp = min((value for value in wanted if value & (value - 1) == 0), default=min(wanted))
    if _has_state(scenario):
        return ": the state of its linear attention passes from rank to rank, which nothing here prices"
    if cp > MOST_CP or cp & (cp - 1):
        return f": powers of two up to {MOST_CP}"
    if rows < LEAST_ROWS * cp:
        each = f"{rows:,.0f} tokens of a mean sequence / {cp} = {rows / cp:,.0f} rows on a rank"
        return f": {each}, fewer than {LEAST_ROWS}, two tiles of matrix products"
    return f": heads do not divide by tp x cp, and all-to-all exchanges whole heads over cp {cp}"


def _language_shapes(scenario: Scenario) -> list[Transformer]:
    languages = [module for module in scenario.model.modules if module.kind == "language_model"]
    return [shape for module in languages if module.transformer for shape in module.transformer.shapes()]


def _has_state(scenario: Scenario) -> bool:
    languages = [module for module in scenario.model.modules if module.kind == "language_model"]
    linear = any(shape.delta for m in languages if m.transformer for shape in m.transformer.shapes())
    return linear or any(m.form.scans for m in languages if m.form)


def expert_degrees(scenario: Scenario, tp: int) -> list[tuple[int, int]]:
    """(ep, etp): experts whole on every rank's tensor-parallel group, or spread, each over one rank or over tp."""
    rules = scenario.constraints
    shapes = [module.transformer for module in scenario.model.modules if module.transformer is not None]
    experts = gcd(*[shape.moe.experts for shape in shapes if shape.moe is not None] or [1])
    degrees = [ep for ep in divisors(experts) if not rules.ep or ep in rules.ep]
    found = [(ep, etp) for ep in degrees for etp in sorted({1, tp} if ep > 1 else {1})]
    return [(ep, etp) for ep, etp in found if not rules.etp or _shared_by(scenario, tp, ep, etp) in rules.etp]


def _shared_by(scenario: Scenario, tp: int, ep: int, etp: int) -> int:
    """Ranks that share one expert: while ep is 1 experts are split as everything else is."""
    shapes = [module.transformer for module in scenario.model.modules if module.transformer is not None]
    return tp if ep == 1 and any(shape.moe is not None for shape in shapes) else etp


def _spreads(scenario: Scenario, tp: int, cp: int) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Modules in front of language models that run whole on part of the samples: those that tp does not divide, or all;
    and those of them whose images are cut along patches.

    Constraints name modules that are spread wherever they can be; an empty list there leaves the choice.
    """
    others = [module for module in scenario.model.modules if module.kind != "language_model"]
    must = tuple(module.name for module in others if not divides(module, tp))
    every = tuple(module.name for module in others)
    if tp * cp == 1 or scenario.model.recorded is not None:
        return [((), ())]
    wanted, cut = scenario.constraints.spread, wanted_patches(scenario)
    if wanted is None:
        raw = tuple(name for name in cut if not read_by(scenario.model, name))
        ways = [(must, ()), (every, ()), (tuple(name for name in every if name in must or name in raw), raw)]
        return list(dict.fromkeys([*ways, (every, cut)]))
    return [(tuple(name for name in every if name in wanted or name in must), cut)]


def wanted_patches(scenario: Scenario) -> tuple[str, ...]:
    """Modules that constraints want cut along patches, or allow to be.

    Raises:
        InputError: one cannot be.
    """
    wanted, able = scenario.constraints.patches, patch_modules(scenario.model)
    if wanted == ():
        return ()
    if scenario.technique.context_parallel == "all-to-all":
        able = ()
    for name in wanted or ():
        if name not in able:
            op, source = row_changing(scenario.model, name), read_by(scenario.model, name)
            why = f"its blocks hold a {op}, which needs rows of other ranks" if op else "attention is by all-to-all"
            why = f"'{source}', which it reads, cannot" if source and not op else why
            raise InputError(f"'{name}' cannot be cut along patches: {why}", key=f"constraints.spread.{name}")
    return able if wanted is None else tuple(name for name in able if name in wanted)


def _replicas(scenario: Scenario, base: Layout) -> Iterator[int]:
    rules, devices = scenario.constraints, scenario.cluster.device_count
    for dp in divisors(scenario.global_batch):
        tiles = base.tp * base.cp * dp % base.expert_side == 0
        if base.tp * base.cp * dp <= devices and tiles and (not rules.dp or dp in rules.dp):
            yield dp


class _Cells(NamedTuple):
    """Columns of rows that share base, sharding and dp."""

    pp: Column
    microbatch_size: Column
    microbatches: Column
    vp: Column


def _cells(
    scenario: Scenario,
    groups: int,
    base: Layout,
    dp: int,
    most_samples: int,
    known: dict[tuple[int, ...], _Cells],
) -> _Cells:
    """Stages, microbatches and chunks per rank; `known` are those of this call's scenario and groups, as most layouts
    of as many ranks have the same."""
    rules, share = scenario.constraints, scenario.global_batch // dp
    deepest = min(groups, scenario.cluster.device_count // (base.tp * base.cp * dp))
    allowed = [size for size in divisors(share) if not rules.microbatch or size in rules.microbatch]
    sizes = [size for size in allowed if size <= max(most_samples, allowed[0])]
    key = (share, deepest, len(sizes), base.batch_factor)
    if key in known:
        return known[key]
    stages = [pp for pp in range(1, deepest + 1) if not rules.pp or pp in rules.pp]
    vp, pp, size = (
        values.ravel()
        for values in np.meshgrid(
            *(np.array(one, dtype=np.int32) for one in (allowed_chunks(scenario), stages, sizes)), indexing="ij"
        )
    )
    count = share // size
    whole = (vp == 1) | ((pp > 1) & (pp * vp <= groups) & (count % pp == 0) & (base.batch_factor == 1))
    whole &= count % base.batch_factor == 0
    kept = whole & (pp.astype(np.int64) * vp * count <= MOST_FORWARDS)
    known[key] = _Cells(pp[kept], size[kept], count[kept], vp[kept])
    return known[key]


def _worth_sharding(scenario: Scenario, base: Layout, dp: int, shardings: Sequence[int]) -> Sequence[int]:
    """Where each weight has one rank, in modules with ranks of their own too, the first allowed way stands for all."""
    several = replace(base, dp=dp).most_replicas > 1 or scenario.constraints.modules != ()
    return shardings if several else shardings[:1]
