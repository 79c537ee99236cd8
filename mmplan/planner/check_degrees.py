"""Whether parallel degrees are possible for a model, a batch and a cluster: one sentence with the arithmetic if not."""

from mmplan.cost_models.degrees import heads_of, sharded_widths
from mmplan.errors import ImpossibleError
from mmplan.planner.degrees import Degrees
from mmplan.scenario.scenario import ModelModule, Scenario


def check_degrees(scenario: Scenario, degrees: Degrees) -> None:
    """Refuse what no run could do.

    Raises:
        ImpossibleError: tp does not divide a language model's sizes (nor cp its heads where they are exchanged), the
            expert side does not tile the ranks, there are fewer blocks than stages, or the degrees need other than the
            cluster's devices.
    """
    for module in scenario.model.modules:
        if module.kind == "language_model":
            _check_tp(module, degrees.tp)
            if scenario.technique.context_parallel == "all-to-all":
                check_exchange(module, degrees.tp, degrees.cp)
            _check_linear_attention(module, degrees)
            _check_experts(module, degrees)
    _check_blocks(scenario, degrees)
    have = scenario.cluster.device_count
    if degrees.devices > have:
        product = f"tp {degrees.tp} x cp {degrees.cp} x pp {degrees.pp} x dp {degrees.dp}"
        raise ImpossibleError(f"{product} = {degrees.devices} devices, the cluster has {have}")
    inside = degrees.tp * degrees.cp * degrees.dp
    side = degrees.ep * degrees.etp
    if inside % side:
        need = side * degrees.pp
        raise ImpossibleError(
            f"experts: ep {degrees.ep} x etp {degrees.etp} = {side} does not divide the tp {degrees.tp} x cp "
            f"{degrees.cp} x dp {degrees.dp} = {inside} ranks of a stage; with pp {degrees.pp} the whole job needs a "
            f"multiple of {need} ranks"
        )


def tensor_widths(module: ModelModule) -> dict[str, int]:
    """Sizes that tp has to divide; vocabularies are padded and experts are split by etp."""
    padded = ("vocabulary", "expert_ffn")
    return {what: size for what, size in sharded_widths(module).items() if what not in padded}


def _check_tp(module: ModelModule, tp: int) -> None:
    for what, size in tensor_widths(module).items():
        if size % tp:
            fitting = [degree for degree in (1, 2, 4, 8, 16) if size % degree == 0]
            raise ImpossibleError(
                f"{module.name}: {what} = {size} / tp {tp} = {size / tp:g} is no whole number; tp can be "
                + ", ".join(map(str, fitting))
            )


def check_exchange(module: ModelModule, tp: int, cp: int) -> None:
    """Context parallelism by all-to-all deals out the heads that tp leaves (arXiv 2309.14509, section 3.2).

    Raises:
        ImpossibleError: these do not divide.
    """
    if module.transformer is None:
        return
    counts = [pair for shape in module.transformer.shapes() for pair in heads_of(shape)]
    for what, count in counts:
        if count % (tp * cp):
            raise ImpossibleError(
                f"{module.name}: {what} = {count} / (tp {tp} x cp {cp}) = "
                f"{count / tp / cp:g} is no whole number, and cp by all-to-all gives each rank whole "
                "heads; take a smaller cp, or `technique.context_parallel: ring`"
            )


def _check_linear_attention(module: ModelModule, degrees: Degrees) -> None:
    """The state of linear attention passes from one rank's rows to the next one's, which nothing here prices."""
    linear = module.transformer is not None and any(shape.delta for shape in module.transformer.shapes())
    if degrees.cp > 1 and (linear or (module.form is not None and module.form.scans)):
        raise ImpossibleError(
            f"{module.name}: cp {degrees.cp} splits rows, and the state of its linear attention runs through all"
        )


def _check_experts(module: ModelModule, degrees: Degrees) -> None:
    moe = module.transformer.moe if module.transformer is not None else None
    if degrees.ep > 1 and moe is None:
        raise ImpossibleError(f"{module.name} has no experts, so ep {degrees.ep} has nothing to spread")
    if moe is not None and moe.experts % degrees.ep:
        raise ImpossibleError(f"{module.name}: {moe.experts} experts / ep {degrees.ep} = {moe.experts / degrees.ep:g}")


def _check_blocks(scenario: Scenario, degrees: Degrees) -> None:
    language = [m for m in scenario.model.modules if m.kind == "language_model" and m.transformer is not None]
    blocks = sum(m.transformer.layers for m in language if m.transformer is not None)
    pieces = degrees.pp * degrees.vp
    if language and pieces > blocks + 2:
        raise ImpossibleError(
            f"pp {degrees.pp} x vp {degrees.vp} = {pieces} pieces of the pipeline, the language model has {blocks} "
            "layers and 2 vocabulary layers: at least one each is needed"
        )
    if degrees.vp > 1 and degrees.microbatches % degrees.pp:
        raise ImpossibleError(
            f"interleaving deals microbatches in groups of pp: {degrees.microbatches} microbatches / pp {degrees.pp} = "
            f"{degrees.microbatches / degrees.pp:g}"
        )
