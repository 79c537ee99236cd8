"""What stages that hold the same matrix hand each other at the end of a step; see `cost_models/ties.py`."""

from collections.abc import Sequence
from dataclasses import dataclass

from mmplan.cost_models.cost_model import CostModel
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.ties import tied_share, trained_ties
from mmplan.planner.plan import Plan
from mmplan.scenario.scenario import DTYPE_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class TiedTable:
    """A trained token table and a head on another stage that reads it."""

    table: str  # layer
    head: str
    stages: tuple[int, int]

    def rows(self, plan: Plan) -> tuple[int, ...]:
        """Pipeline ranks that have a copy."""
        return tuple(dict.fromkeys(map(plan.row, self.stages)))


def tied_tables(plan: Plan, graph: ComputationGraph) -> tuple[TiedTable, ...]:
    """Those of the plan that lie in two stages."""
    stage_of = plan.stage_of_layer()
    pairs = ((table, head, (stage_of[table], stage_of[head])) for table, head in trained_ties(graph))
    return tuple(TiedTable(table=a, head=b, stages=stages) for a, b, stages in pairs if stages[0] != stages[1])


def tie_bytes(plan: Plan, graph: ComputationGraph, tied: TiedTable) -> int:
    """Of the buffer that each rank hands to the sum; 0 where one rank has both stages."""
    return share_bytes(plan, graph, tied) if len(tied.rows(plan)) > 1 else 0


def share_bytes(plan: Plan, graph: ComputationGraph, tied: TiedTable) -> int:
    """Of what a rank has of the matrix' summed gradient."""
    share = tied_share(graph.layer(tied.head), plan.layout(tied.stages[1]))
    return share * DTYPE_BYTES[plan.scenario.optimizer.gradient_dtype]


def tie_seconds(costs: CostModel, size: float, ranks: int, near: bool) -> float:
    """All-reduce over a few ranks by a ring: 2 (n - 1) messages of an n-th one after another (Thakur, Rabenseifner,
    Gropp, IJHPCA 2005, section 4.5)."""
    return 2 * (ranks - 1) * costs.transfer_s(size / ranks, near) if size else 0.0


def tie_near(plan: Plan, stages: Sequence[int], replica: int) -> bool:
    """Whether the ranks of a replica that have a copy share a node."""
    node_of = plan.scenario.cluster.node_of
    return len({node_of(plan.rank(stage, replica)) for stage in stages}) == 1
