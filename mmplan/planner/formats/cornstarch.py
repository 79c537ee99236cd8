"""A plan as pipeline templates in the manner of Cornstarch: one for each modality, stages on ranks of their own.

Cornstarch (github.com/cornstarch-org/Cornstarch, its documentation of `PipelineTemplate`, `ModalParallelPlugin` and
`MultimodalParallelPlugin`) takes a list of layers for each stage of each modality, one tp for all, and runs 1F1B over
encoders side by side. It cannot be installed beside a current torch: the JSON keeps its words and is read back by us.
"""

import json
from collections.abc import Mapping
from typing import Any

from mmplan.errors import CheckError
from mmplan.planner.formats.exported import Exported
from mmplan.planner.formats.linearised import Draft
from mmplan.planner.formats.simple_schedule import under_1f1b
from mmplan.planner.formats.workarounds import (
    Workaround,
    all_recomputed,
    residuals_whole,
    with_sharding,
    worked_around,
)
from mmplan.planner.plan import Plan, module_of
from mmplan.scenario.layer_ids import expand_ids, shorten_ids

TARGET = "cornstarch"


def _whole_optimizer(draft: Draft, target: str) -> Draft:
    return with_sharding(draft, "none", f"{target}'s optimizer shards nothing over replicas")


WORKAROUNDS: Mapping[str, Workaround] = {
    **dict.fromkeys(("ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-2 in a pipeline", "ZeRO-3 in a pipeline"), _whole_optimizer),
    **dict.fromkeys(("schedule GPipe", "schedule zero bubble", "free order of actions"), under_1f1b),
    "backwards in two parts": under_1f1b,
    "recomputation by stage": all_recomputed,
    "recomputation of some blocks": all_recomputed,
    "recomputation of attention": all_recomputed,
    "sequence parallelism": residuals_whole,
}


def export_cornstarch(plan: Plan) -> Exported:
    """`templates.json`.

    Raises:
        CheckError: stages of several modalities share ranks, a rank has several stages, or another need that is
            impossible there.
    """
    draft = worked_around(plan, TARGET, WORKAROUNDS)
    document = _document(draft.plan)
    notes = ("tp_size and layers go into PipelineTemplate and ModalParallelPlugin, the rest beside them",)
    return Exported(
        target=TARGET,
        version="Cornstarch 0.0.5",
        files={"templates.json": json.dumps(document, indent=1) + "\n"},
        losses=draft.losses,
        notes=notes,
    )


def _document(plan: Plan) -> dict[str, Any]:
    return {
        "tp_size": plan.tp,
        "sp_size": plan.cp,
        "dp_size": plan.dp,
        "num_microbatches": plan.microbatches,
        "microbatch_size": plan.microbatch_size,
        "schedule": "1f1b",
        "gradient_checkpointing": plan.stages[0].recompute == "full",
        "templates": _templates(plan),
    }


def _templates(plan: Plan) -> list[dict[str, Any]]:
    """Encoders in the order of their first stages, then the language model."""
    kinds = {module.name: module for module in plan.scenario.model.modules}
    stages: dict[str, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        names = list(dict.fromkeys(map(module_of, stage.layers)))
        owners = [name for name in names if kinds[name].kind != "projector"]
        owner = owners[0] if owners else _producer(plan, names[0])
        late = [name for name in names if name not in owners and owners and kinds[owner].kind == "language_model"]
        if late:
            raise CheckError(
                f"Cornstarch has projectors behind their encoders' last stages; stage {index} holds {late[0]} beside "
                f"{owner}"
            )
        stages.setdefault(owner, []).append(index)
    return [_template(plan, name, of) for name, of in sorted(stages.items(), key=lambda item: item[1])]


def _producer(plan: Plan, projector: str) -> str:
    """The encoder that feeds a projector which has a stage of its own."""
    return next((e.producer for e in plan.scenario.model.edges if e.consumer == projector), projector)


def _template(plan: Plan, name: str, stages: list[int]) -> dict[str, Any]:
    module = plan.scenario.model.module(name)
    parts = []
    for stage in stages:
        ranks = plan.stage_ranks(stage)
        parts.append({"layers": list(shorten_ids(plan.stages[stage].layers)), "ranks": [ranks[0], ranks[-1]]})
    return {
        "model_name": name,
        "modality": "language_model" if module.kind == "language_model" else module.modality,
        "train": module.training.mode,
        "modules_per_stage": parts,
    }


def read_templates(text: str) -> dict[str, Any]:
    """The document of `export_cornstarch` as plain values, `layers` of each stage as full ids.

    Raises:
        ValueError: it is none, its ranks do not tile the world, or a stage has other ranks than tp x sp x dp.
    """
    document: dict[str, Any] = json.loads(text)
    width = document["tp_size"] * document["sp_size"] * document["dp_size"]
    stages = [stage for template in document["templates"] for stage in template["modules_per_stage"]]
    for place, stage in enumerate(sorted(stages, key=lambda one: one["ranks"])):
        first, last = stage["ranks"]
        if (first, last) != (place * width, (place + 1) * width - 1):
            raise ValueError(f"stage {place} has ranks {first} to {last}, expected {width} from {place * width} on")
        stage["layers"] = expand_ids(stage["layers"])
    return document
