"""Which modules of a model can have ranks of their own, and which degrees these can have."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

from mmplan.cost_models.degrees import divides
from mmplan.cost_models.patches import patch_modules, read_by
from mmplan.planner.branches import branches
from mmplan.planner.configuration import divisors
from mmplan.planner.configurations import MOST_CP
from mmplan.planner.mesh import Mesh
from mmplan.scenario.asked import OwnRanks
from mmplan.scenario.scenario import Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class Apart:
    """Modules of one mesh, and values of its degrees: tp, cp and ep together, of dp and pp what constraints allow
    (empty: any). `patches`: modules whose rows cp cuts."""

    modules: tuple[str, ...]
    widths: tuple[tuple[int, int, int], ...]
    dp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    patches: tuple[str, ...] = ()

    def mesh(self, tp: int, cp: int, ep: int, dp: int, first_rank: int = 0) -> Mesh:
        """With these degrees."""
        patches = self.patches if cp > 1 else ()
        return Mesh(modules=self.modules, tp=tp, cp=cp, ep=ep, dp=dp, first_rank=first_rank, patches=patches)


def mesh_choices(scenario: Scenario) -> tuple[tuple[Apart, ...], ...]:
    """Ways to give some modules meshes of their own; each lists these meshes. What constraints name is in the only one.

    A branch (encoder, projector) goes as a whole. Each branch alone is tried, all on meshes of their own, and all on
    one: with two branches these are all ways, with more some mixtures are missing.
    """
    every, pins = branches(scenario), scenario.constraints.modules
    if pins is not None:
        return (tuple(_pinned(scenario, every, pins)),) if pins else ()
    if not every:
        return ()
    dealt: list[tuple[tuple[str, ...], ...]] = [(branch,) for branch in every]
    if len(every) > 1:
        dealt += [every, (tuple(name for branch in every for name in branch),)]
    found = (tuple(_free(scenario, modules) for modules in meshes) for meshes in dealt)
    return tuple(meshes for meshes in found if all(mesh.widths for mesh in meshes))


def _free(scenario: Scenario, modules: tuple[str, ...], pin: OwnRanks | None = None) -> Apart:
    pin = pin or OwnRanks(module=modules[0])
    tps = [tp for tp in _widths(scenario, modules) if not pin.tp or tp in pin.tp]
    cps = [2**k for k in range(MOST_CP.bit_length()) if not pin.cp or 2**k in pin.cp]
    eps = [ep for ep in divisors(experts_of(scenario, modules)) if not pin.ep or ep in pin.ep]
    able = patch_modules(scenario.model) if scenario.technique.context_parallel != "all-to-all" else ()
    return Apart(
        modules=modules,
        widths=tuple(
            (tp, cp, ep) for tp in tps for cp in cps for ep in eps if tp * cp in (tp, cp) and (cp == 1 or ep == 1)
        ),
        dp=pin.dp,
        pp=pin.pp,
        patches=tuple(name for name in modules if name in able and read_by(scenario.model, name) in ("", *modules)),
    )


def experts_of(scenario: Scenario, modules: Sequence[str]) -> int:
    """Experts that ranks can share evenly, over all of these modules; 1 where there are none."""
    shapes = [scenario.model.module(name).transformer for name in modules]
    return gcd(*[shape.moe.experts for shape in shapes if shape is not None and shape.moe is not None] or [1])


def _pinned(scenario: Scenario, every: Sequence[tuple[str, ...]], pins: Sequence[OwnRanks]) -> Iterator[Apart]:
    """The branch of each named module, less what constraints name of it separately."""
    named = {pin.module for pin in pins}
    order = [module.name for module in scenario.model.modules]
    for pin in sorted(pins, key=lambda pin: order.index(pin.module)):
        (branch,) = [names for names in every if pin.module in names] or [(pin.module,)]
        modules = tuple(name for name in branch if name == pin.module or name not in named)
        yield _free(scenario, modules, pin)


def _widths(scenario: Scenario, modules: Sequence[str]) -> Iterator[int]:
    """Tensor-parallel degrees that divide the nodes and all of the modules."""
    sizes = [pool.devices_per_node for pool in scenario.cluster.pools]
    members = [scenario.model.module(name) for name in modules]
    for tp in range(1, min(sizes) + 1):
        if all(size % tp == 0 for size in sizes) and all(divides(module, tp) for module in members):
            yield tp
