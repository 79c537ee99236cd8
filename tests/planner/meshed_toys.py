"""Plans whose encoders have ranks of their own, made from a configuration and a cut."""

from dataclasses import replace

from pipeline_toys import scenario

from mmplan.planner.configuration import Configuration
from mmplan.planner.cut_plan import plan_from_cut
from mmplan.planner.mesh import Mesh
from mmplan.planner.plan import Plan
from mmplan.planner.priced_groups import priced_groups
from mmplan.scenario.scenario import Constraints, Sample, Scenario

VISION = ("vision.embed", "vision.0", "vision.1", "vision_projector.0")
LLM = (("llm.embed", "llm.0", "llm.1"), ("llm.2", "llm.3", "llm.head", "llm.loss"))


def job(*, devices: int = 16, manifest: tuple[Sample, ...] = (), global_batch: int = 32) -> Scenario:
    """A vision tower of two blocks, a projector and a language model of four blocks."""
    made = scenario(
        vision_layers=2,
        llm_layers=4,
        global_batch=global_batch,
        devices=devices,
        manifest=manifest,
        constraints=Constraints(memory_headroom=0.0),
    )
    (pool,) = made.cluster.pools
    pool = replace(pool, nodes=max(1, devices // 4), devices_per_node=min(4, devices))
    return replace(made, cluster=replace(made.cluster, pools=(pool,)))


def meshed(
    of: Scenario,
    *,
    vision: tuple[int, int],
    llm: tuple[int, int],
    microbatch: int,
    cp: int = 1,
    vision_cp: int = 1,
    first_rank: int | None = None,
    cut_vision: bool = False,
) -> Plan:
    """(tp, dp) of each side, cp of both; the vision tower behind its ranks unless said otherwise."""
    (tp, dp), stages = llm, [*LLM]
    first = 2 * tp * cp * dp if first_rank is None else first_rank
    mesh = Mesh(
        modules=("vision", "vision_projector"),
        tp=vision[0],
        cp=vision_cp,
        dp=vision[1],
        first_rank=first,
        patches=("vision",) if vision_cp > 1 else (),
    )
    encoder = [VISION[:2], VISION[2:]] if cut_vision else [VISION]
    configuration = Configuration(
        tp=tp,
        cp=cp,
        dp=dp,
        pp=len(encoder) + 2,
        microbatch_size=microbatch,
        microbatches=of.global_batch // dp // microbatch,
        schedule="1f1b",
        meshes=(mesh,),
        mesh_stages=(len(encoder),),
    )
    prices = priced_groups(of).prices
    return plan_from_cut(prices, configuration, [*encoder, *stages], bound_s=0.0, status="given", wall_s=0.0)
