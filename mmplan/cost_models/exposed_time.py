"""Seconds that a layer waits for tensor, context and expert parallel communication; what overlaps is left out."""

from dataclasses import replace

from mmplan.cost_models.collectives import Group, all_reduce_s, all_to_all_s, gather_s, group_of, message_s
from mmplan.cost_models.copied_heads import summed_copies
from mmplan.cost_models.expert_ops import Combine, Dispatch
from mmplan.cost_models.layer import Layer, splits_rows
from mmplan.cost_models.load import Load
from mmplan.cost_models.op_time import has_dgrad
from mmplan.cost_models.ops import Attention, Embedding, Linear, Op
from mmplan.cost_models.recorded_ops import RecordedRest
from mmplan.cost_models.sequence_values import summed_weights
from mmplan.cost_models.shard import Shard
from mmplan.cost_models.strided import strided, strided_elements
from mmplan.cost_models.time_rules import DGRAD, FORWARD, PART, Rules, Seconds

_RING_MERGE_BYTES = 10  # per step and element of the output: fp32 sum read and written, 16-bit part read


def add_cp(seconds: Seconds, rules: Rules, op: Attention, load: Load, shard: Shard) -> None:
    """What context parallelism adds to an attention operator."""
    if shard.cp > 1:
        _ADD_CP[rules.technique.context_parallel](seconds, rules, op, load, shard)


def _add_cp_ring(seconds: Seconds, rules: Rules, op: Attention, load: Load, shard: Shard) -> None:
    """Ring attention (arXiv 2310.01889): keys and values travel cp - 1 hops beside the attention of what is here, in
    the backward pass with their gradients; each step adds its part to the output and to the query gradient in fp32
    (TransformerEngine, attn_forward_func_with_cp)."""
    part = PART["cp"]
    link = rules.node_link if shard.tp * shard.cp <= rules.devices_per_node else rules.network_link
    hop = message_s((op.k.elements(load, shard) + op.v.elements(load, shard)) * rules.element_bytes, link)
    for phase, volume in ((FORWARD, 1), (DGRAD, 2)):
        beside = seconds[phase, PART["attention"]]
        if beside > 0:
            ring = volume * hop * (shard.cp - 1)
            merged = _RING_MERGE_BYTES * shard.cp * op.y.elements(load, shard) / rules.pointwise_bytes_per_s
            seconds[phase, part] += merged
            seconds[phase, part] += max(0.0, ring - beside) + rules.stack.exposed_cp * min(ring, beside)


def _add_cp_exchange(seconds: Seconds, rules: Rules, op: Attention, load: Load, shard: Shard) -> None:
    """DeepSpeed-Ulysses (arXiv 2309.14509, section 3.2): queries, keys and values each go through an all-to-all before
    attention, its output through one after; backward the gradients of all four. Nothing runs beside them."""
    group = group_of(shard.cp, shard.tp, rules.devices_per_node)
    once = sum(
        all_to_all_s(value.elements(load, shard) * rules.element_bytes, group, rules.node_link, rules.network_link)
        for value in (op.q, op.k, op.v, op.y)
    )
    for phase in (FORWARD, DGRAD):
        if seconds[phase, PART["attention"]] > 0:
            seconds[phase, PART["cp"]] += once


def _add_cp_gather(seconds: Seconds, rules: Rules, op: Attention, load: Load, shard: Shard) -> None:
    """Keys and values of all rows are gathered in front of attention (Llama 3, arXiv 2407.21783, section 3.3.2), and
    once more for the backward, behind which the gradients of all rows are summed. Nothing runs beside them."""
    group, links = group_of(shard.cp, shard.tp, rules.devices_per_node), (rules.node_link, rules.network_link)
    sizes = [shard.cp * value.elements(load, shard) * rules.element_bytes for value in (op.k, op.v)]
    gathers = sum(gather_s(size, group, *links) for size in sizes)
    sums = sum(all_reduce_s(size, group, *links) for size in sizes)
    for phase, waited in ((FORWARD, gathers), (DGRAD, gathers + sums)):
        if seconds[phase, PART["attention"]] > 0:
            seconds[phase, PART["cp"]] += waited


def add_strided(seconds: Seconds, rules: Rules, layer: Layer, op: Op, load: Load, shard: Shard) -> None:
    """Rows of which a projector makes one lie on several ranks: what each gives of all results is summed and dealt
    out (a strided reduce-scatter), and their gradient is gathered."""
    if shard.cp == 1 or not strided(op, layer):
        return
    size, group = strided_elements(op, load, shard) * rules.element_bytes, group_of(shard.cp, 1, rules.devices_per_node)
    once = gather_s(size, group, rules.node_link, rules.network_link)
    seconds[FORWARD, PART["cp"]] += once
    seconds[DGRAD, PART["cp"]] += once if has_dgrad(layer, op) else 0.0


_ADD_CP = {"ring": _add_cp_ring, "gather": _add_cp_gather, "all-to-all": _add_cp_exchange}


def reduced_forward_elements(layer: Layer, load: Load, shard: Shard) -> tuple[float, ...]:
    """Elements of each all-reduce of a layer's forward: outputs of row-parallel linears and of the split table, and the
    sum over experts that are split the same way (with expert parallelism `add_ep` has it)."""
    if isinstance(layer.ops[-1], RecordedRest):
        return layer.ops[-1].forward_sums(load, shard.tp)
    whole_experts = shard.ep > 1 or shard.expert_tp == 1
    reduced = [
        op.y
        for op in layer.ops
        if isinstance(op, Embedding)
        or (isinstance(op, Linear) and op.parallel == "row")
        or (isinstance(op, Combine) and not whole_experts)
    ]
    return tuple(value.elements(load, shard) for value in reduced)


def reduced_backward_elements(layer: Layer, load: Load, shard: Shard) -> tuple[float, ...]:
    """Elements of each all-reduce of a layer's backward: one per distinct input of column-parallel linears, and of
    experts that are split the same way."""
    if isinstance(layer.ops[-1], RecordedRest):
        return layer.ops[-1].backward_sums(layer.grad_values, load, shard.tp)
    whole_experts = shard.ep > 1 or shard.expert_tp == 1
    columns = [
        op.x
        for op in layer.ops
        if (isinstance(op, Linear) and op.parallel == "column") or (isinstance(op, Dispatch) and not whole_experts)
    ]
    distinct = {value.name: value for value in columns if value.name in layer.grad_values}
    return tuple(value.elements(load, shard) for value in distinct.values())


def add_tp(seconds: Seconds, rules: Rules, layer: Layer, load: Load, shard: Shard) -> None:
    """With sequence parallel each all-reduce becomes a gather and a reduce-scatter of the same volume, and the backward
    gathers the input of column-parallel linears once more (arXiv 2205.05198, section 4.2.2); mmplan's own runtime sums
    gradients of weights that all ranks have alike every microbatch, others once a step. Gradients of key heads that
    several ranks hold are summed over these."""
    if shard.tp == 1:
        return
    part, size, stack = PART["tp"], rules.element_bytes, rules.stack
    group = Group(shard.tp, min(shard.tp, rules.devices_per_node))
    links = rules.node_link, rules.network_link
    parallel = rules.technique.sequence_parallel and splits_rows(layer)

    def reduced_s(elements: float) -> float:
        if parallel:
            return 2 * gather_s(elements * size, group, *links)
        return all_reduce_s(elements * size, group, *links)

    forward = sum(map(reduced_s, reduced_forward_elements(layer, load, shard)))
    seconds[FORWARD, part] += stack.exposed_tp_forward * forward
    again = 1.5 if parallel else 1.0
    backward = sum(map(reduced_s, reduced_backward_elements(layer, load, shard)))
    copied = sum(
        all_reduce_s(elements * size, Group(ranks, min(ranks, rules.devices_per_node)), *links)
        for elements, ranks in summed_copies(layer, load, shard)
    )
    if parallel and rules.technique.stack == "mmplan":
        summed = summed_weights(layer, replace(shard, sequence=True)).values()
        copied += sum(all_reduce_s(elements * size, group, *links) for elements in summed)
    seconds[DGRAD, part] += stack.exposed_tp_backward * (again * backward + copied)


def add_ep(seconds: Seconds, rules: Rules, layer: Layer, load: Load, shard: Shard) -> None:
    """All-to-all of routed rows before and after the experts, forward and backward (arXiv 2006.16668); with expert
    tensor parallelism the rows are gathered over its ranks as well."""
    if shard.ep == 1:
        return
    group = Group(shard.ep, max(1, min(shard.ep, rules.devices_per_node // shard.expert_tp)))
    for op in layer.ops:
        if not isinstance(op, Dispatch | Combine):
            continue
        value = op.y if isinstance(op, Dispatch) else op.x
        sent = value.elements(load, shard) * rules.element_bytes / shard.expert_tp
        once = all_to_all_s(sent, group, rules.node_link, rules.network_link)
        if shard.expert_tp > 1:
            inner = Group(shard.expert_tp, min(shard.expert_tp, rules.devices_per_node))
            once += gather_s(sent * shard.expert_tp, inner, rules.node_link, rules.network_link)
        seconds[FORWARD, PART["ep"]] += once
        if has_dgrad(layer, op):
            seconds[DGRAD, PART["ep"]] += once
