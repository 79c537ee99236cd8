"""Does any batch make ranks wait for each other, because some modality is missing on one of them?

For the plan's own rules every program is lowered and checked; the rules of other runtimes (see `runtime_rules`) explain
the hangs that people meet there. Patterns are those of one microbatch, of one replica, of alternate ones and of all.
"""

from collections.abc import Sequence, Set
from dataclasses import replace

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.load import Loads
from mmplan.errors import InputError
from mmplan.planner.check_program import check_program, circles
from mmplan.planner.finding import Finding
from mmplan.planner.lower import lower
from mmplan.planner.plan import Plan
from mmplan.planner.presence import NAMES, disagreement, optional_modalities, pattern_loads, patterns
from mmplan.planner.program import Action, Program, RankProgram
from mmplan.planner.runtime_rules import DATA_PARALLEL, RuntimeName, collectives, first_difference
from mmplan.scenario.scenario import Modality


def runtime_name(text: str) -> RuntimeName:
    """InputError when no rules are known by that name."""
    known: tuple[RuntimeName, ...] = ("mmplan", "megatron-pp", *DATA_PARALLEL)
    for name in known:
        if name == text:
            return name
    raise InputError(f"no rules are known for runtime '{text}'; known: {', '.join(known)}")


def check_hangs(plan: Plan, runtime: RuntimeName = "mmplan") -> tuple[Finding, ...]:
    """Every way in which a batch makes ranks diverge, with the two ranks and the fix; empty when none does."""
    if runtime == "mmplan":
        return _own(plan)
    if plan.meshes:
        apart = " and ".join(plan.meshes[0].modules)
        raise InputError(f"the plan has {apart} on ranks of their own, which {runtime} does not run")
    if plan.prefetch:
        names = " and ".join(plan.prefetch)
        raise InputError(f"the plan runs {names} a step ahead, which {runtime} does not do")
    if runtime == "megatron-pp":
        return _fixed_pipeline(plan)
    return _data_parallel(plan, runtime)


def _own(plan: Plan) -> tuple[Finding, ...]:
    """Both ends of every transfer and all replicas of every reduction agree for every pattern."""
    short = _shortened(plan)
    graph = build_graph(plan.scenario)
    optional = optional_modalities(plan.scenario, plan.microbatch_size).keys()
    whole = pattern_loads(plan.scenario, frozenset())
    for missing in patterns(optional):
        loads = pattern_loads(plan.scenario, missing)
        for name, step in _layouts(short, whole, loads):
            findings = check_program(lower(short, graph, step))
            if findings:
                what = f"without {_listed(missing)} {name}"
                return (Finding(rule="hang", message=f"{what}: {findings[0].message}"),)
    return ()


def _layouts(plan: Plan, whole: Loads, lacking: Loads) -> list[tuple[str, list[list[Loads]]]]:
    """Steps in which some microbatches lack something: [part][microbatch]."""
    m = plan.microbatches
    others = [[whole] * m for _ in range(plan.parts - 1)]
    return [
        ("in microbatch 0 of replica 0", [[lacking, *[whole] * (m - 1)], *others]),
        ("in all microbatches of replica 0", [[lacking] * m, *others]),
        ("in every other microbatch", [[(lacking, whole)[k % 2] for k in range(m)] for _ in range(plan.parts)]),
        ("in the whole batch", [[lacking] * m for _ in range(plan.parts)]),
    ]


def _shortened(plan: Plan) -> Plan:
    """The plan with as few replicas and microbatches as show every order of transfers: in 1F1B and GPipe the rest
    repeats."""
    repeats = plan.schedule in ("1f1b", "gpipe")
    dp = plan.dp if plan.meshes else min(plan.dp, 2)
    m = min(plan.microbatches, (2 * plan.pp + 2) * plan.batch_factor) if repeats else plan.microbatches
    scenario = replace(plan.scenario, global_batch=dp * m * plan.microbatch_size)
    return replace(plan, scenario=scenario, dp=dp, microbatches=m)


def _data_parallel(plan: Plan, runtime: RuntimeName) -> tuple[Finding, ...]:
    """Pairs of patterns whose ranks make unequal collectives, those that differ in one modality first."""
    rules, graph = DATA_PARALLEL[runtime], build_graph(plan.scenario)
    optional = optional_modalities(plan.scenario, plan.microbatch_size)
    whole = collectives(plan.scenario, graph, rules, pattern_loads(plan.scenario, frozenset()))
    explained: set[Modality] = set()
    findings = []
    for missing in patterns(optional.keys())[1:]:
        calls = collectives(plan.scenario, graph, rules, pattern_loads(plan.scenario, missing))
        difference = first_difference(whole, calls)
        if difference is None or missing & explained:
            continue
        explained |= missing
        index, has, lacks = difference
        what = _listed(missing)
        modules = [module.name for module in plan.scenario.model.modules if module.modality in missing]
        often = max(disagreement(optional[modality], plan.rank_count, 1) for modality in missing)
        message = (
            f"call {index} of a microbatch: rank 0 with {what} is at {has}, rank 1 without {what} at {lacks}; "
            f"{_percent(often)} of microbatches on {plan.rank_count} ranks differ so. Fix: "
            + rules.fix.format(modules=" and ".join(modules), what=what)
        )
        findings.append(Finding(rule=f"hang under {runtime}", message=message))
    return tuple(findings)


def _percent(share: float) -> str:
    return "less than 1%" if 0 < share < 0.01 else f"{share:.0%}"


def _fixed_pipeline(plan: Plan) -> tuple[Finding, ...]:
    """A pipeline that expects the same tensors in every microbatch and posts them in a fixed order."""
    short = replace(_shortened(plan), dp=1)
    short = replace(short, scenario=replace(short.scenario, global_batch=short.microbatches * plan.microbatch_size))
    graph = build_graph(plan.scenario)
    whole = pattern_loads(plan.scenario, frozenset())
    expected = lower(short, graph, [[whole] * short.microbatches])
    findings = []
    for missing in patterns(optional_modalities(plan.scenario, plan.microbatch_size).keys())[1:]:
        finding = _unequal_ends(short, graph, expected, missing)
        if finding is not None and len(missing) == 1:
            findings.append(finding)
    lengths = {sample.text_tokens for sample in plan.scenario.data.manifest} | set(
        plan.scenario.data.text_tokens.values if not plan.scenario.data.manifest else ()
    )
    if len(lengths) > 1 and plan.pp > 1:
        message = (
            f"text has {len(lengths)} lengths from {min(lengths):g} to {max(lengths):g} tokens: a receive of fixed "
            "length does not match. Fix: send shapes first (variable sequence lengths), pack or pad to one length"
        )
        findings.append(Finding(rule="hang under megatron-pp", message=message))
    circle = tuple(circles(_send_then_receive(expected)))
    if circle:
        message = (
            f"sends right behind and receives right before their computes, without buffers: {circle[0].message}. "
            "Fix: post both ends of all transfers in one global order, or sends and receives of a step as one batch"
        )
        findings.append(Finding(rule="hang under megatron-pp", message=message))
    return tuple(findings)


def _unequal_ends(plan: Plan, graph: ComputationGraph, expected: Program, missing: Set[Modality]) -> Finding | None:
    """Microbatch 0 lacks something: its tensors are not sent, and received all the same."""
    whole, lacking = pattern_loads(plan.scenario, frozenset()), pattern_loads(plan.scenario, missing)
    sent = lower(plan, graph, [[lacking, *[whole] * (plan.microbatches - 1)]])
    there = {(rank.rank, a.peer, a.tensor, a.microbatch) for rank in sent.ranks for a in rank.actions}
    receives = [(rank.rank, action) for rank in expected.ranks for action in rank.actions if action.kind == "RECV"]
    for rank, action in sorted(receives, key=lambda item: "<" in item[1].tensor):  # activations first
        if (rank, action.peer, action.tensor, action.microbatch) not in there:
            message = (
                f"microbatch {action.microbatch} without {_listed(missing)}: rank {rank} waits for {action.tensor} "
                f"({action.bytes:,} bytes), which rank {action.peer} never sends. Fix: send an empty or dummy tensor "
                "for every microbatch, or leave out both ends by one rule"
            )
            return Finding(rule="hang under megatron-pp", message=message)
    return None


def _send_then_receive(program: Program) -> Program:
    """The program with every receive moved right before the compute that reads it."""
    ranks = []
    for rank in program.ranks:
        receives: dict[tuple[int, bool, int], list[Action]] = {}
        for action in rank.actions:
            if action.kind == "RECV":
                receives.setdefault((action.stage, "<" in action.tensor, action.microbatch), []).append(action)
        actions: list[Action] = []
        for action in rank.actions:
            if action.kind in ("F", "B", "I"):
                actions += receives.get((action.stage, action.kind != "F", action.microbatch), [])
            if action.kind != "RECV":
                actions.append(action)
        ranks.append(RankProgram(rank=rank.rank, stage=rank.stage, replica=rank.replica, actions=tuple(actions)))
    return replace(program, ranks=tuple(ranks))


def _listed(missing: Set[Modality]) -> str:
    names: Sequence[str] = [NAMES[modality] for modality in sorted(missing)]
    return " and ".join(names) or "nothing"
