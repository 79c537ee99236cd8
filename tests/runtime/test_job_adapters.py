"""Adapters that a job's model brings: what they begin with, and what a plan refuses of them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from adapted_models import RANK, Adapted, adapted
from ghost_models import llava
from job_plan_cases import cut, job_of, scenario_of, with_training

from mmplan.cost_models.build import build_graph
from mmplan.errors import InputError
from mmplan.planner.plan import Plan
from mmplan.runtime.ghost.importing import record_job
from mmplan.runtime.ghost.job import Job
from mmplan.runtime.ghost.laying import lay
from mmplan.runtime.ghost.pretrained import Pretrained
from mmplan.runtime.ghost.weightless import build_weightless, initial_value

QUERIES = "model.language_model.layers.0.self_attn.q_proj"


def test_frozen_weights_inside_adapters_are_read_and_adapters_begin_as_the_model_has_them(tmp_path: Path) -> None:
    torch.manual_seed(1)
    real = llava()[0]()
    real.save_pretrained(tmp_path)
    model = build_weightless(adapted()[0])
    pretrained = Pretrained(tmp_path, model)
    for name, parameter in model.named_parameters():
        adapter = name.endswith(("low.weight", "high.weight"))
        assert pretrained.lacks(name) == adapter
        if not adapter:
            saved = real.get_parameter(name.replace(".base.", "."))
            assert torch.equal(pretrained.value(name, parameter), saved)
    first = {
        kind: initial_value(name, model.get_parameter(name), 0, torch.float32)
        for kind in ("high", "low")
        for name in [f"{QUERIES}.{kind}.weight"]
    }
    assert not first["high"].any() and first["low"].all()


def test_a_trained_parameter_that_no_file_has_is_refused_where_nothing_beside_it_is_frozen(tmp_path: Path) -> None:
    llava()[0]().save_pretrained(tmp_path)
    model = build_weightless(llava()[0])
    model.get_submodule("model.multi_modal_projector").extra = nn.Linear(2, 2)
    name = "model.multi_modal_projector.extra.weight"
    pretrained = Pretrained(tmp_path, model)
    assert not pretrained.lacks(name)
    with pytest.raises(InputError, match=r"no tensor for the parameter 'model\.multi_modal_projector\.extra\.weight'"):
        pretrained.value(name, model.get_parameter(name))


def laid(plan: Plan, job: Job) -> None:
    stream = iter(job.batches(1))
    lay(plan, job, build_graph(plan.scenario), [next(stream)])


def test_adapters_of_another_rank_or_a_base_that_is_trained_are_refused_with_the_counts(tmp_path: Path) -> None:
    scenario, job = scenario_of("llava", tmp_path), job_of("adapted")
    plan = cut(with_training(scenario, "llm", "lora", rank=RANK, targets=("q", "v")))
    laid(plan, job)
    with pytest.raises(InputError, match=r"the plan's layers have"):
        laid(cut(with_training(scenario, "llm", "lora", rank=RANK - 1, targets=("q", "v"))), job)

    def trained() -> nn.Module:
        model = job.model()
        for module in model.modules():
            if isinstance(module, Adapted):
                module.base.requires_grad_(True)
        return model

    told = r"the plan trains 448 parameters of llm\.0 \(LoRA, rank 4 on q, v\), the job's model 1,984"
    with pytest.raises(InputError, match=told):
        laid(plan, replace(job, model=trained))


def test_a_recording_knows_what_the_model_trains() -> None:
    model, _ = record_job(replace(job_of("adapted"), batches=lambda size: [adapted()[1]]))
    assert model.recorded is not None
    kinds = dict(model.recorded.kinds)
    blocks = [kinds[layer.kind] for layer in model.recorded.layers if layer.id == "language_model.1"]
    assert [(kind.parameters, kind.trained) for kind in blocks] == [(8192, 448)]
    assert {product.weight for kind in blocks for product in kind.products} == {"frozen", "trained"}
