"""What torchtitan's log says that other frameworks say by arguments: model, batch, sharding, recomputation."""

from collections.abc import Mapping

from mmplan.scenario.formats.launch.arguments import Argument
from mmplan.scenario.formats.launch.facts import Fact
from mmplan.scenario.formats.launch.known_models import known_model
from mmplan.scenario.formats.logs.trainer_lines import FSDP, LOCAL_BATCH, MODEL, RECOMPUTE

_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocabulary")


def torchtitan_facts(arguments: Mapping[str, Argument], facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """Facts of the lines of `trainer_lines.py`; empty where none of them stands.

    Args:
        facts: what the other lines say.
    """
    said = {name: arguments[name] for name in (LOCAL_BATCH, MODEL, RECOMPUTE, FSDP) if name in arguments}
    if not said:
        return {}
    found = {"stack": next(iter(said.values())).fact("torch-2025")}
    pipeline = "pp" in facts and str(facts["pp"].value) != "1"
    if LOCAL_BATCH in said and not pipeline:  # a pipeline splits it into microbatches
        found["microbatch"] = said[LOCAL_BATCH].fact(said[LOCAL_BATCH].values[0])
    if RECOMPUTE in said:
        found["recompute"] = said[RECOMPUTE].fact(said[RECOMPUTE].values[0])
    if FSDP in said:  # it gathers parameters again in backward unless a pipeline runs
        found["sharding"] = said[FSDP].fact("gradients" if pipeline else "parameters")
    model = known_model(said[MODEL].values[0]) if MODEL in said else None
    sizes = model["modules"]["llm"] if model is not None and "modules" in model else {}
    if "moe" not in sizes:
        found |= {name: said[MODEL].fact(sizes[name]) for name in _SIZES if name in sizes}
        if sizes:
            found["gated"] = said[MODEL].fact(True)
    return found
