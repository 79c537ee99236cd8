"""What hooks must not do: change the training, count twice, or stay behind."""

from pathlib import Path
from typing import Any

import pytest
import torch
from health_toys import WATCH, Toy, batch, toy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmplan.runtime.health.hooks import attach
from mmplan.runtime.health.readings import load_readings


class Noisy(nn.Module):
    """Dropout and running statistics between image and text."""

    def __init__(self) -> None:
        super().__init__()
        self.toy = toy()
        self.toy.bridge = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.3))

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        return self.toy(**batch)


def inside(watch: dict[str, Any]) -> dict[str, Any]:
    """The same settings for a model that holds the toy."""

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: f"toy.{path}" for key, path in value.items()}
        return [f"toy.{path}" for path in value] if isinstance(value, list) else value

    return {key: moved(value) for key, value in watch.items()}


def trained(watch: dict[str, Any] | None, steps: int = 6) -> tuple[dict[str, Tensor], int]:
    """Weights and gradients, and how many hooks are left."""
    torch.manual_seed(0)
    model, draw = Noisy(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    health = None if watch is None else attach(model, **inside(watch), interval=2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**batch(draw))["loss"].backward()
        optimizer.step()
    if health is not None:
        health.close()
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**model.state_dict(), **gradients}, hooks


def test_training_is_the_same_to_the_bit_and_nothing_stays_behind() -> None:
    watch = {key: value for key, value in WATCH.items() if key != "cross_attention"}
    (plain, none), (watched, left) = trained(None), trained(watch)
    assert none == left == 0
    for name, value in plain.items():
        assert torch.equal(value, watched[name]), name


def test_a_reading_of_cross_attention_only_changes_the_order_of_sums() -> None:
    (plain, _), (watched, left) = trained(None, 1), trained(WATCH, 1)
    assert left == 0
    for name in (name for name in plain if name.startswith("gradient")):
        torch.testing.assert_close(watched[name], plain[name], rtol=1e-4, atol=1e-6)


def test_two_watchers_of_one_model_leave_its_shared_parameters_alone() -> None:
    model = toy()
    shared = model.image_embedding.weight
    with attach(model, **WATCH, interval=1) as one, attach(model, **WATCH, interval=1) as other:
        model(**batch(torch.Generator().manual_seed(0)))["loss"].backward()
        one.step()
        other.step()
    assert model.image_embedding.weight is shared and model.text_embedding.weight is shared
    assert any(reading.monitor == "shared_conflict" for reading in one.readings)


def test_forwards_without_gradients_and_their_numbers_are_not_counted() -> None:
    model, draw = toy(), torch.Generator().manual_seed(0)
    with attach(model, **WATCH, interval=1) as health:
        with torch.no_grad():
            model(**batch(draw))
        health.step()
    assert health.readings == []


@pytest.mark.parametrize("cut", [True, False])
def test_a_branch_that_is_cut_off_has_no_share_and_one_that_did_not_run_is_not_judged(cut: bool) -> None:
    class Cut(Toy):
        def forward(self, pixels: Tensor, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            text = self.text(ids)
            return {"loss": (text + self.vision(pixels).detach()).mean() if cut else text.mean()}

    model = Cut()
    with attach(model, modalities=WATCH["modalities"], interval=1) as health:
        for seed in range(3):
            model(**batch(torch.Generator().manual_seed(seed)))["loss"].backward()
            health.step()
    fired = [reading.of for reading in health.readings if reading.fired]
    assert fired == (["branches: vision"] if cut else [])


class Recomputed(Toy):
    def forward(self, pixels: Tensor, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        def loss(image: Tensor) -> Tensor:
            out = self.image_out(image.mean(1))
            return out.square().mean()

        return {"loss": checkpoint(loss, self.vision(pixels), use_reentrant=False)}


def test_what_a_backward_computes_again_is_counted_once() -> None:
    model = Recomputed()
    with attach(model, **WATCH, interval=1) as health:
        model(**batch(torch.Generator().manual_seed(0)))["loss"].backward()
        assert [len(rows) for rows in health._taps.embeddings.values()] == [1]
        health.step()


def test_readings_go_to_the_file_and_to_a_writer(tmp_path: Path) -> None:
    class Writer:
        def __init__(self) -> None:
            self.scalars: list[tuple[str, int]] = []

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            self.scalars.append((tag, global_step))

    writer, model = Writer(), toy()
    with attach(model, **WATCH, interval=1, file=tmp_path / "health.jsonl", writer=writer) as health:
        for seed in range(2):
            model(**batch(torch.Generator().manual_seed(seed)))["loss"].backward()
            health.step()
    assert load_readings(tmp_path / "health.jsonl") == tuple(health.readings)
    assert ("health/jed/vision+text", 1) in writer.scalars and len(writer.scalars) == len(health.readings)


def test_a_scaled_gradient_that_overflows_is_told_with_the_module_that_computes_in_fp16() -> None:
    model = toy()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=2.0**40)
    with attach(model, **WATCH, interval=100) as health:
        scaler.scale(model(**batch(torch.Generator().manual_seed(0)))["loss"]).backward()
        health.step()
        scaler.step(optimizer)
    (found,) = health.readings
    assert (found.monitor, found.of, found.detail["because"]) == ("overflow", "vision.block", "backward")


def test_only_the_optimizer_of_this_model_is_noticed() -> None:
    model, other = toy(), nn.Linear(2, 2)
    with attach(model, **WATCH, interval=1) as health:
        model(**batch(torch.Generator().manual_seed(0)))["loss"].backward()
        other(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        assert health.readings == []
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert health.readings


def test_names_that_the_model_has_not_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the model has no module 'visoin'.*did you mean 'vision'"):
        attach(toy(), modalities={"vision": "visoin"})
    with pytest.raises(ValueError, match="interval 0"):
        attach(toy(), interval=0)


def test_a_model_of_transformers_is_watched_by_one_line() -> None:
    pytest.importorskip("transformers")
    import llava_job

    model, batches = llava_job.model().train(), llava_job.batches(1)
    with attach(model, interval=1) as health:
        next(batches)
        model(**next(batches)).loss.backward()
        health.step()
    found = {reading.of: reading for reading in health.readings if reading.monitor == "gradient_attenuation"}
    assert set(found) == {"branches: vision", "branches: text"}
    share = found["branches: vision"]
    assert share.value is not None and 0 < share.value < 1
    assert all(isinstance(norm, float) and norm > 0 for key, norm in share.detail.items() if key.startswith("norm of"))


def test_a_compiled_model_gives_the_same_readings() -> None:
    """But headroom, whose hooks come and go; what `torch.compile` wraps is looked through."""

    def read(model: nn.Module, run: Any) -> dict[tuple[str, str], float | None]:
        torch.manual_seed(0)
        with attach(run, **WATCH, interval=1) as health:
            run(**batch(torch.Generator().manual_seed(0)))["loss"].backward()
            health.step()
        return {(r.monitor, r.of): r.value for r in health.readings if r.monitor != "headroom"}

    plain, compiled = toy(), toy()
    expected = read(plain, plain)
    assert len(expected) > 6
    assert read(compiled, torch.compile(compiled, backend="eager")) == pytest.approx(expected, rel=1e-4)
