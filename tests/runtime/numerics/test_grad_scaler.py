"""Loss scales per modality against unscaled gradients and against torch's own scaler."""

from typing import Any

import llava_job
import pytest
import torch
from case_processes import run_on_ranks
from scaler_cases import PROCESSES, Model, Tower, batch, gradients, overflow, run_scaler_cases, scaler_of, scales
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmplan.runtime.numerics.global_norm import gradient_norms
from mmplan.runtime.numerics.grad_scaler import ModalityGradScaler
from mmplan.runtime.numerics.loss_scale import LossScale, ScaleRule
from mmplan.runtime.numerics.sharing import Sharing

START = {"vision": 2.0**5, "audio": 2.0**12, "shared": 2.0**9}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(run_scaler_cases, PROCESSES, tmp_path_factory.mktemp("scaler"))


def unscaled(model: nn.Module, *seeds: int) -> dict[str, Tensor]:
    model.zero_grad()
    sum(model(*batch(seed)).square().mean() / len(seeds) for seed in seeds).backward()
    return gradients(model)


def test_gradients_of_towers_trunk_and_tied_parameters_are_unscaled_to_the_bit() -> None:
    model = Model()
    expected = unscaled(model, 0)
    scaler = scaler_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    scaler.scale(model(*batch(0)).square().mean()).backward()
    raw = gradients(model)
    for name, part in (
        ("vision.first.weight", "vision"),
        ("trunk.weight", "shared"),
        ("vision.table.weight", "shared"),
    ):
        assert torch.equal(raw[name], expected[name] * START[part]), name
    scaler.unscale_(optimizer)
    found = gradients(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_recomputed_tower_has_the_same_gradients() -> None:
    class Recomputing(Tower):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    model = Model()
    expected = unscaled(model, 0)
    model.vision.__class__ = Recomputing
    scaler, optimizer = scaler_of(model), torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    scaler.scale(model(*batch(0)).square().mean()).backward()
    scaler.unscale_(optimizer)
    assert all(torch.equal(found, expected[name]) for name, found in gradients(model).items())


@pytest.mark.parametrize(
    ("where", "guilty", "spoilt"),
    [
        ("vision.first", "vision", {"vision"}),
        ("vision.table", "vision", {"vision", "shared"}),  # the table is tied: its gradient is the shared part's
        ("audio.first", "audio", {"audio"}),
        ("trunk", "shared", {"vision", "audio", "shared"}),
    ],
)
def test_the_part_in_which_an_overflow_began_backs_off_alone(where: str, guilty: str, spoilt: set[str]) -> None:
    """The parts that it has spoilt miss the step, the others take it."""
    model = Model()
    scaler, optimizer = scaler_of(model), torch.optim.Adam(model.parameters(), lr=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    overflow(model.get_submodule(where))
    scaler.scale(model(*batch(0)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scales(scaler) == START | {guilty: START[guilty] / 2}
    for name, parameter in model.named_parameters():
        part = "shared" if name in ("vision.table.weight", "trunk.weight", "trunk.bias") else name.split(".")[0]
        assert torch.equal(parameter, before[name]) == (part in spoilt), name


def test_one_modality_moves_as_torchs_scaler_does() -> None:
    generator = torch.Generator().manual_seed(3)
    ours, theirs = Tower(), Tower()
    theirs.load_state_dict(ours.state_dict())
    rule: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 3}
    scaler, reference = ModalityGradScaler(ours, {}, **rule), torch.amp.GradScaler("cpu", **rule)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in (ours, theirs)]
    for step in range(40):
        bad = torch.rand((), generator=generator) < 0.2
        for model, one, optimizer in zip((ours, theirs), (scaler, reference), optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(batch(step)[0]).square().mean() * (torch.inf if bad else 1)
            one.scale(loss).backward()
            one.step(optimizer)
            one.update()
        assert scaler.get_scale() == reference.get_scale()
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert scaler.state_dict()["_growth_tracker"]["shared"] == reference.state_dict()["_growth_tracker"]
    loaded = scaler_of(Model())
    loaded.load_state_dict(reference.state_dict())
    assert scales(loaded) == dict.fromkeys(START, reference.get_scale())


def test_raising_the_scale_on_overflow_as_an_article_does_never_takes_a_step_again() -> None:
    """fp16 holds 65504: gradients of 4 overflow above a scale of 2^14 = 16384 (4 x 2^14 = 65536)."""

    def overflows(scale: float) -> bool:
        return bool(torch.tensor(4.0 * min(scale, 2.0**100)).half().isinf())

    backing_off, raising = LossScale(scale=2.0**16), 2.0**16
    taken = {"backs off": 0, "raises": 0}
    for _ in range(50):
        taken["raises"] += not overflows(raising)
        raising *= 2
        if overflows(backing_off.scale):
            backing_off = backing_off.after_overflow(ScaleRule())
        else:
            taken["backs off"] += 1
    assert taken == {"backs off": 47, "raises": 0}
    with pytest.raises(ValueError, match=r"backoff_factor 2\.0 is not below 1: an overflow would repeat for ever"):
        ModalityGradScaler(Model(), {}, backoff_factor=2.0)


def test_a_scale_grows_after_quiet_steps_in_which_its_modality_was_there() -> None:
    model = Model(tied=False)
    scaler = scaler_of(model, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(batch(0)[0], None).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scales(scaler) == {"vision": 2.0**6, "audio": 2.0**12, "shared": 2.0**10}


def test_fp16_gradients_of_a_faint_tower_survive_only_by_a_scale_of_their_own() -> None:
    """The trunk's output has gradients of 2^12, so that a scale above 2^3 overflows; the tower's first layer has
    2^12 x 2^-14 (trunk) x 2^-24 (two layers) x 2 samples = 2^-25, which fp16 does not hold below a scale of 2^12."""

    def first_gradient(scale_of_vision: float, scale_of_shared: float) -> Tensor:
        layers = [nn.Linear(4, 4, bias=False) for _ in range(4)]
        for layer, weight in zip(layers, (1.0, 2.0**-12, 2.0**-12, 2.0**-14), strict=True):
            layer.weight.data = torch.eye(4) * weight
        model = nn.ModuleDict({"vision": nn.Sequential(*layers[:3]), "trunk": layers[3]})
        scaler = ModalityGradScaler(model, {"vision": model["vision"]})
        scaler.update({"vision": scale_of_vision, "shared": scale_of_shared})
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (model["trunk"](model["vision"](torch.ones(2, 4))).float() * 2.0**12).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(torch.optim.SGD(model.parameters(), lr=1.0))
        return layers[0].weight.grad  # type: ignore[return-value]

    assert torch.equal(first_gradient(2.0**14, 1.0), torch.full((4, 4), 2.0**-25))
    assert torch.equal(first_gradient(1.0, 1.0), torch.zeros(4, 4))
    assert not first_gradient(2.0**14, 2.0**14).isfinite().any()


def test_what_is_written_to_in_place_behind_a_border_has_the_same_gradients() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.stem, self.vision, self.head = (
                nn.Linear(6, 6),
                nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)),
                nn.Linear(6, 2),
            )

        def forward(self, images: Tensor, clips: Tensor) -> Tensor:
            x = self.vision(self.stem(images))
            x += clips
            return self.head(x)

    model = Writing()
    expected = unscaled(model, 0)
    scaler, optimizer = ModalityGradScaler(model, {"vision": model.vision}), torch.optim.SGD(model.parameters(), lr=1)
    scaler.update({"vision": 2.0**3, "shared": 2.0**7})
    optimizer.zero_grad()
    scaler.scale(model(*batch(0)).square().mean()).backward()
    scaler.unscale_(optimizer)
    assert all(torch.equal(found, expected[name]) for name, found in gradients(model).items())


@pytest.mark.parametrize("reentrant", [False, True])
def test_parts_of_a_tower_that_are_called_from_outside_have_the_same_gradients(reentrant: bool) -> None:
    """As a language model's embedding is by the whole model; the other part is recomputed inside the tower's call."""

    class Outside(Model):
        def forward(self, images: Tensor, clips: Tensor | None) -> Tensor:
            return super().forward(self.vision.table(self.stem(images)), clips)

    class Recomputing(Tower):
        def forward(self, x: Tensor) -> Tensor:
            return self.table(torch.tanh(checkpoint(self.first, x, use_reentrant=reentrant)))

    model = Outside()
    model.stem = nn.Linear(6, 6)
    model.vision.__class__ = Recomputing
    expected = unscaled(model, 0)
    scaler, optimizer = scaler_of(model), torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    scaler.scale(model(*batch(0)).square().mean()).backward()
    scaler.unscale_(optimizer)
    assert all(torch.equal(found, expected[name]) for name, found in gradients(model).items())


@pytest.mark.parametrize("recomputing", [False, True])
def test_a_model_of_transformers_is_unscaled_to_the_bit(recomputing: bool) -> None:
    """LLaVA with its head tied to the embedding, which the whole model calls and not the language model."""
    torch.manual_seed(0)
    model = llava_job.model().train()
    model.lm_head.weight = model.model.language_model.embed_tokens.weight
    if recomputing:
        model.gradient_checkpointing_enable()
    data = next(sample for sample in llava_job.batches(1) if "pixel_values" in sample)
    model(**data).loss.backward()
    expected = gradients(model)
    model.zero_grad()
    towers = {"vision": model.model.vision_tower, "text": model.model.language_model}
    scaler, optimizer = ModalityGradScaler(model, towers), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.update({"vision": 2.0**4, "text": 2.0**11, "shared": 2.0**8})
    scaler.scale(model(**data).loss).backward()
    scaler.unscale_(optimizer)
    found = gradients(model)
    assert found.keys() == expected.keys() and len(found) > 20
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_call_that_fails_leaves_no_border_open() -> None:
    model = Model()
    expected = unscaled(model, 0)
    scaler, optimizer = scaler_of(model), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.zeros(2, 5), None)
    optimizer.zero_grad()
    scaler.scale(model(*batch(0)).square().mean()).backward()
    scaler.unscale_(optimizer)
    assert all(torch.equal(found, expected[name]) for name, found in gradients(model).items())


def test_weights_that_no_module_call_uses_are_told() -> None:
    model = Model(tied=False)
    scaler, optimizer = scaler_of(model), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale((batch(0)[0] @ model.vision.first.weight).square().mean()).backward()
    with pytest.raises(ValueError, match="parameters of 'vision' have gradients, but no output of its modules passed"):
        scaler.step(optimizer)


@pytest.mark.parametrize(
    ("optimizer", "options", "sparse"),
    [
        (torch.optim.AdamW, {"fused": True}, False),
        (torch.optim.AdamW, {"foreach": True}, False),
        (torch.optim.SGD, {"fused": True}, False),
        (torch.optim.SGD, {}, True),
        (torch.optim.SparseAdam, {}, True),
    ],
)
def test_every_kind_of_optimizer_steps_as_without_scales(
    optimizer: type[torch.optim.Optimizer], options: dict[str, Any], sparse: bool
) -> None:
    def trained(scaled: bool, overflow_step: int | None = None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"text": nn.Embedding(9, 4, sparse=sparse), "head": nn.Linear(4, 2)})
        weights = model["text"].parameters() if sparse else model.parameters()
        step = optimizer(weights, lr=0.1, **options)  # type: ignore[call-arg]
        scaler = ModalityGradScaler(model, {"text": model["text"]}, enabled=scaled)
        for index in range(3):
            model.zero_grad()
            loss = model["head"](model["text"](torch.tensor([1, 5, 1, 0]))).square().mean()
            scaler.scale(loss * torch.inf if index == overflow_step else loss).backward()
            scaler.step(step)
            scaler.update()
        assert scaler.get_scale("text") == (2.0**16 if scaled else 1)  # what comes from the loss is not its fault
        assert scaler.get_scale() == ((2.0**16 if overflow_step is None else 2.0**15) if scaled else 1)
        return [p.detach() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))
    assert all(p.isfinite().all() for p in trained(True, overflow_step=1))


def test_a_second_step_without_an_update_is_refused_as_by_torch() -> None:
    model, weight = nn.Linear(2, 2), torch.zeros(2, 2)
    scaler, optimizer = ModalityGradScaler(model, {}), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    weight.copy_(model.weight.detach())
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called on this optimizer since the last update"):
        scaler.step(optimizer)
    assert torch.equal(model.weight, weight)
    scaler.update()
    scaler.step(optimizer)


def test_state_is_kept_and_wrong_uses_are_refused() -> None:
    model = Model()
    scaler = scaler_of(model)
    other = ModalityGradScaler(model, {"vision": model.vision, "audio": model.audio}, enabled=False)
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == {} and other.get_scale("vision") == 1 and not other.is_enabled()
    again = scaler_of(Model())
    again.load_state_dict(scaler.state_dict())
    assert again.state_dict() == scaler.state_dict()
    one = Model()
    with pytest.raises(ValueError, match="a state of audio, shared, vision for shared, vision"):
        ModalityGradScaler(one, {"vision": one.vision}).load_state_dict(scaler.state_dict())
    with pytest.raises(ValueError, match=r"a Tower has the hooks of another scaler: call its `remove\(\)` first"):
        scaler_of(model)
    scaler.remove()
    scaler_of(model).remove()
    with pytest.raises(ValueError, match=r"a loss scale 3\.0 is no power of two"):
        ModalityGradScaler(Model(), {}, init_scale=3.0)
    with pytest.raises(ValueError, match="a Tower belongs to 'vision' and to 'audio'"):
        ModalityGradScaler(model, {"vision": model.vision, "audio": model.vision})
    losses = {"a": torch.ones(1), "b": [torch.ones(1)]}
    assert scaler.scale(losses) == {"a": torch.tensor([2.0**9]), "b": [torch.tensor([2.0**9])]}
    with pytest.raises(ValueError, match="outputs must be tensors, or an iterable or mapping of them, not str"):
        scaler.scale(["loss"])
    with pytest.raises(ValueError, match="no modality 'touch': there are vision, audio, shared"):
        scaler.scale(torch.ones(1), "touch")
    with pytest.raises(RuntimeError, match="no gradients were unscaled"):
        scaler.update()
    half = nn.Linear(2, 2).half()
    (half.weight.sum() * 1).backward()
    with pytest.raises(ValueError, match="is fp16, which cannot hold"):
        ModalityGradScaler(half, {}).unscale_(torch.optim.SGD(half.parameters(), lr=1.0))


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["DDP", "FSDP2"])
def test_ranks_agree_on_who_overflowed(case: str, ranks: list[dict[str, Any]]) -> None:
    model = Model(tied=case == "DDP")
    expected = unscaled(model, 0, 1)
    norms = gradient_norms(Sharing(model, {"vision": model.vision, "audio": model.audio}))
    for rank in ranks:
        result = rank[case]
        assert result["norms"] == pytest.approx({part: norm.item() for part, norm in norms.of.items()}, rel=1e-6)
        assert result["scales"] == START | {"vision": START["vision"] / 2}
        for name, gradient in expected.items():
            torch.testing.assert_close(result["gradients"][name], gradient, rtol=1e-6, atol=1e-8)
        assert result["moved"] == {name for name in expected if not name.startswith("vision.first")} - (
            {"vision.table.weight", "vision.table.bias"} if case == "FSDP2" else {"vision.table.bias"}
        )


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["microbatches", "one backward", "two backwards"])
def test_several_losses_of_a_step_under_ddp_take_one_backward_for_each_forward(
    case: str, ranks: list[dict[str, Any]]
) -> None:
    """DDP averages in the first backward of a forward; a second one adds what stays this rank's own."""
    model = Model()
    if case == "microbatches":
        losses = [model(*batch(seed)).square().mean() for seed in range(4)]
    else:
        outputs = [model(*batch(seed)) for seed in range(2)]
        losses = [loss for output in outputs for loss in (output.square().mean(), output.abs().mean())]
    (torch.stack(losses).sum() / 2).backward()
    expected = gradients(model)
    for rank in ranks:
        near = [torch.allclose(rank["several"][case][name], g, rtol=1e-5, atol=1e-7) for name, g in expected.items()]
        assert all(near) if case != "two backwards" else not any(near)
    first, second = (rank["several"][case]["trunk.weight"] for rank in ranks)
    assert first.equal(second) == (case != "two backwards")


@pytest.mark.distributed
def test_a_modality_that_one_rank_lacks_is_seen_by_all(ranks: list[dict[str, Any]]) -> None:
    model = Model(tied=False)
    (images, _), (others, clips) = batch(0), batch(1)
    ((model(images, None).square().mean() + model(others, clips).square().mean()) / 2).backward()
    for rank in ranks:
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(rank["absent"]["gradients"][name], gradient, rtol=1e-6, atol=1e-8)
        assert rank["absent"]["scales"] == {part: 2 * scale for part, scale in START.items()}


@pytest.mark.distributed
def test_a_tower_cut_by_a_pipeline_has_one_scale_and_one_verdict(ranks: list[dict[str, Any]]) -> None:
    whole = Model(tied=False)
    (whole(batch(0)[0], None).square().mean()).backward()
    expected = gradients(whole)
    first, second = (rank["pipeline"] for rank in ranks)
    torch.testing.assert_close(first["gradients"]["weight"], expected["vision.first.weight"])
    torch.testing.assert_close(second["gradients"]["0.weight"], expected["vision.table.weight"])
    torch.testing.assert_close(second["gradients"]["1.weight"], expected["trunk.weight"])
    assert first["scales"] == second["scales"] == {"vision": 2.0**4, "shared": 2.0**9}
    assert first["moved"] == [False, False] and second["moved"] == [False, False, True, True]
