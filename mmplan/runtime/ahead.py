"""Features of the next step (`Plan.prefetch`): which part of a program makes them, and where they wait for it."""

from dataclasses import dataclass, field, replace

from mmplan.planner.plan import Plan
from mmplan.planner.program import Action, RankProgram, is_ahead
from mmplan.runtime.network import Message


@dataclass(slots=True)
class Features:
    """What a rank has received, or is about to, for forwards of the next step: by stage and microbatch."""

    received: dict[tuple[int, int], list[tuple[Action, Message]]] = field(default_factory=dict)

    def add(self, action: Action, message: Message) -> None:
        self.received.setdefault((action.stage, action.microbatch), []).append((action, message))

    def kept_bytes(self) -> int:
        return sum(action.bytes for messages in self.received.values() for action, _ in messages)


def ahead_part(plan: Plan, program: RankProgram) -> RankProgram:
    """What of a program makes features and takes them; before the first step it is run on that step's own batch."""

    def belongs(action: Action) -> bool:
        if action.kind not in ("F", "SEND", "RECV"):
            return False
        return plan.is_ahead(action.stage) or is_ahead(action.tensor)

    return replace(program, actions=tuple(filter(belongs, program.actions)))
