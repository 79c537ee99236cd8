"""What is said, in one sentence, when a model, its data or its weights cannot be measured."""

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from test_hessian_measure import QUICK, SCENARIO, Heard, by_name, measured, question

from mmplan.errors import InputError
from mmplan.runtime.hessian.processes import sensitivity
from mmplan.runtime.hessian.values import DOUBTFUL

LANGUAGE = """\
name: own
model:
  modules:
    llm: {kind: language_model, layers: 2, hidden: 8, heads: 2, kv_heads: 1, ffn: 8, vocabulary: 40}
data: {text_tokens: [6, 9]}
batch: {global: 4}
precision: fp32
cluster: {device: cpu-core, nodes: 1, devices_per_node: 2}
"""
# A LLaMA by hand with the layers of that scenario; `extra` is called on what the first block makes.
JOB = """
import torch
from torch import nn
import torch.nn.functional as F

{extra}

class Block(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first = first
        self.norm1, self.norm2 = nn.RMSNorm(8), nn.RMSNorm(8)
        self.q, self.k = nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False)
        self.v, self.o = nn.Linear(8, 4, bias=False), nn.Linear(8, 8, bias=False)
        self.gate, self.up, self.down = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.act = Extra()

    def forward(self, x):
        n, heads = self.norm1(x), lambda t, c: t.view(*t.shape[:2], c, 4).transpose(1, 2)
        a = F.scaled_dot_product_attention(heads(self.q(n), 2), heads(self.k(n), 1), heads(self.v(n), 1),
                                           is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(x.shape))
        n = self.norm2(x)
        return x + self.down(self.act(self.gate(n)) * self.up(n))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.blocks = nn.ModuleList(Block(i == 0) for i in range(2))
        self.norm = nn.RMSNorm(8)
        self.head = nn.Linear(8, 40, bias=False)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {{"loss": loss, "logits": logits}}

def model():
    return Model()

def batches(size):
    for index in range({count}):
        ids = torch.randint(0, 40, (size, 6), generator=torch.Generator().manual_seed(index))
        yield {{"input_ids": ids, "labels": ids}}
"""
PLAIN = """
class Extra(nn.Module):
    def forward(self, x):
        return F.silu(x)
"""
ONCE = """
from torch.autograd.function import once_differentiable

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad

class Extra(nn.Module):
    def forward(self, x):
        return Square.apply(x)
"""
# Its backward takes the slope for a constant, so that the second derivative is silently zero.
WRONG = """
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.slope = 20 * x.detach()
        return 10 * x * x

    @staticmethod
    def backward(ctx, grad):
        return ctx.slope * grad

class Extra(nn.Module):
    def forward(self, x):
        return Square.apply(x)
"""
NOT_A_NUMBER = """
class Extra(nn.Module):
    def forward(self, x):
        return torch.log(x - 1000.0)
"""
# Its gradient at zero is taken for zero, the second derivative is not.
NORM_OF_ZERO = """
class Extra(nn.Module):
    def forward(self, x):
        return F.silu(x) + (x - x.detach()).norm()
"""

OTHER = """
import torch

def batches(size):
    while True:
        ids = torch.arange(6 * size).view(size, 6)
        yield {"input_ids": ids, "labels": ids}
"""


def job(folder: Path, extra: str = PLAIN, count: int = 100) -> Path:
    path = folder / "job.py"
    path.write_text(JOB.format(extra=textwrap.dedent(extra), count=count))
    return path


def asked(folder: Path, extra: str = PLAIN, count: int = 100, **files: Path):  # type: ignore[no-untyped-def]
    settings = replace(QUICK, layers=("llm.0",), samples=2, batches=1)
    return question(folder, settings, LANGUAGE, job=job(folder, extra, count), **files)


def test_a_job_is_measured_like_a_scenario(tmp_path: Path) -> None:
    found = measured(asked(tmp_path))
    assert by_name(found)["llm.0", "text"] > 0
    assert found.source["samples_from"] == "batches of job.py"
    assert found.values[0].difference is not None
    assert found.values[0].difference < 0.01


def test_the_forwards_of_a_batch_do_not_change_what_is_found(tmp_path: Path) -> None:
    alone, together = asked(tmp_path), asked(tmp_path)
    one = by_name(measured(replace(alone, settings=replace(alone.settings, microbatch=1))))
    assert one.keys() == {("llm.0", "text")}
    with pytest.raises(InputError, match="a batch of 2 samples is no whole number of forwards of 3 samples"):
        measured(replace(together, settings=replace(together.settings, microbatch=3), restart=True))


def test_gauss_newton_has_no_negative_eigenvalue(tmp_path: Path) -> None:
    one = asked(tmp_path)
    found = measured(replace(one, settings=replace(one.settings, gauss_newton=True)))
    assert found.values[0].least >= -1e-4 * found.values[0].value
    assert found.source["matrix"] == "Gauss-Newton"


def test_recomputing_gives_the_same_value(tmp_path: Path) -> None:
    one = asked(tmp_path)
    kept = by_name(measured(one))
    again = replace(one, settings=replace(one.settings, recompute=True), restart=True)
    assert by_name(measured(again)) == pytest.approx(kept, rel=1e-6)


def test_an_operator_without_a_second_derivative_is_named_with_its_module(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^Square in module 'blocks\.0\.act' \(Extra\) has no second derivative"):
        measured(asked(tmp_path, ONCE))


def test_a_wrong_second_derivative_is_noticed(tmp_path: Path) -> None:
    difference = measured(asked(tmp_path, WRONG)).values[0].difference
    assert difference is not None
    assert difference > DOUBTFUL


def test_a_loss_that_is_no_number_is_traced_to_a_module(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"the loss of batch 0 .* is nan; first seen in the output of .*blocks\.0\.act'"
    ):
        measured(asked(tmp_path, NOT_A_NUMBER))


def test_a_second_derivative_that_is_no_number_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the loss of batch 0 \(text\) has no finite second derivative by .*'llm\.0'"):
        measured(asked(tmp_path, NORM_OF_ZERO))


def test_data_that_ends_too_early_is_told_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"`batches` ended after 1, and batches 1 to 2 were asked for"):
        measured(asked(tmp_path, count=1))


def test_data_of_another_file_takes_the_place_of_the_jobs(tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(OTHER)
    own = by_name(measured(asked(tmp_path)))
    assert by_name(measured(replace(asked(tmp_path, data=other), restart=True))) != own


def test_a_manifest_takes_the_place_of_the_scenarios_data(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text_tokens": 12, "images": [8]}\n{"text_tokens": 3}\n')
    found = measured(question(tmp_path, data=rows))
    assert found.source["samples_from"] == "2 rows of a manifest"
    with pytest.raises(InputError, match=r"rows\.csv: no such file"):
        measured(question(tmp_path, data=tmp_path / "rows.csv"))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (("llm.9",), "--layers: unknown layer 'llm.9'; 'llm' has 2 blocks, the last is 'llm.1'"),
        (("llm.loss",), "--layers: 'llm.loss' has no parameters of its own, and a sensitivity is of parameters"),
    ],
)
def test_a_layer_that_cannot_be_measured_is_told(tmp_path: Path, layers: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError) as caught:
        measured(question(tmp_path, replace(QUICK, layers=layers)))
    assert str(caught.value) == message


def test_frozen_layers_are_measured_unless_they_are_skipped(tmp_path: Path) -> None:
    text = SCENARIO + "train: {vision: frozen}\n"
    found = measured(question(tmp_path, text=text))
    assert {one.layer: one.frozen for one in found.values} == {"vision.0": True, "llm.1": False}
    with pytest.raises(InputError, match=r"--layers: 'vision\.0' is frozen, and --skip-frozen leaves it out"):
        measured(question(tmp_path, replace(QUICK, skip_frozen=True), text))
    rest = measured(
        replace(question(tmp_path, replace(QUICK, skip_frozen=True, layers=("llm.1",)), text), restart=True)
    )
    assert {one.layer for one in rest.values} == {"llm.1"}


def test_files_that_are_wrong_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.yaml: no such file"):
        measured(replace(question(tmp_path), scenario=tmp_path / "nowhere.yaml"))
    with pytest.raises(InputError, match=r"nowhere\.py: no such file"):
        measured(replace(question(tmp_path), job=tmp_path / "nowhere.py"))
    with pytest.raises(InputError, match="no checkpoint there"):
        measured(question(tmp_path, weights=tmp_path))
    broken = tmp_path / "broken.py"
    broken.write_text("def batches(size): yield {}\n")
    with pytest.raises(InputError, match="expected a function `model`, found none"):
        measured(replace(question(tmp_path), job=broken))
    wider = LANGUAGE.replace("ffn: 8", "ffn: 16")
    with pytest.raises(InputError, match="do not make up the layers of the plan"):
        measured(question(tmp_path, replace(QUICK, layers=()), wider, job=job(tmp_path)))


def test_a_dry_run_measures_nothing(tmp_path: Path) -> None:
    heard = Heard()
    assert sensitivity(question(tmp_path), local=None, dry_run=True, listener=heard) is None
    (estimate,) = heard.estimates
    assert (estimate.values, estimate.usual, estimate.most) == (2 * (1 + 2), 10, 50)
    assert estimate.forwards > 0
    assert estimate.seconds(50) > estimate.seconds(10) > 0
    assert not heard.values
    assert not question(tmp_path).partial.exists()


SPLIT = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.{module} import {function}

if not dist.is_initialized():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def split(whole):
    {how}
    return whole
"""


@pytest.mark.parametrize(
    ("module", "function", "how"),
    [
        ("fsdp", "fully_shard", "fully_shard(whole)"),
        (
            "tensor.parallel",
            "parallelize_module, ColwiseParallel",
            'parallelize_module(whole, init_device_mesh("cpu", (1,)), {"blocks.0.q": ColwiseParallel()})',
        ),
    ],
)
def test_a_model_that_is_split_over_ranks_is_refused(module: str, function: str, how: str, tmp_path: Path) -> None:
    """Sharded by FSDP2 or by tensors; what a layer's weights bend is asked of whole layers."""
    file = job(tmp_path, SPLIT.format(module=module, function=function, how=how) + PLAIN)
    file.write_text(file.read_text().replace("return Model()", "return split(Model())"))
    try:
        with pytest.raises(InputError, match=r"splits '[^']+' over ranks \(DTensor\), and sensitivity measures whole"):
            measured(question(tmp_path, replace(QUICK, layers=("llm.0",)), LANGUAGE, job=file))
    finally:
        dist.destroy_process_group()


def test_a_model_that_is_one_stage_of_a_pipeline_is_refused(tmp_path: Path) -> None:
    file = job(tmp_path)
    file.write_text(file.read_text().replace("for i in range(2)", "for i in range(1)"))
    with pytest.raises(InputError, match=r"the model.s modules do not make up the layers of the plan"):
        measured(question(tmp_path, replace(QUICK, layers=("llm.0",)), LANGUAGE, job=file))
