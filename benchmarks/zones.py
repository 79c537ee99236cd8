"""Does lossy treatment hurt more inside the zones of `mmplan sensitivity` than outside them?

    python benchmarks/zones.py [--models 15] [--steps 400]     # rewrites benchmarks/zones.csv, ten minutes of one core

Small LLaVA models (transformers) are trained from different seeds on made pictures of digits with captions
(`digit_captions.py`); each is measured by `mmplan sensitivity --job`, and zones are taken by the 85th percentile. Then
one layer at a time is treated, and the increase of the loss on 256 unseen samples is taken:

- 4-bit weights: matrices rounded to 15 levels per row, the largest magnitude of a row being the last;
- FP8 weights: matrices rounded to e4m3, scaled by their largest magnitude;
- equal noise: Gaussian noise of one norm for all layers, 5 % of the norm of the median layer; mean of 8 draws.

Top-k gradients are a treatment of several layers at once: from half-way training goes on for 100 steps in which all
zone layers keep 1 % of each gradient, or as many others do (drawn), without error feedback.
`inside` and `outside` are means over layers and models of the increase; `low` to `high` is the 95 % interval (Student's
t over models) of inside minus outside. `rank_correlation` is Spearman's over layers of eigenvalue and increase, the
mean over models.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from digit_captions import TEST_SEED, model, samples
from measured import MACHINE, ROOT, write_rows
from torch import nn

from mmplan.runtime.hessian.result import Measured
from mmplan.runtime.hessian.run import finish, prepare
from mmplan.runtime.hessian.settings import Question, Settings
from mmplan.runtime.hessian.statistics import mean_interval, rank_correlation

RATE, BATCH, UNSEEN, DRAWS, KEPT, SPARSE_STEPS = 3e-3, 32, 256, 8, 0.01, 100
SCENARIO = """\
name: digits
model: {hf_config: config.json}
data: {images: 1, text_tokens: 6}
batch: {global: 32}
precision: fp32
cluster: {device: cpu-core, nodes: 1, devices_per_node: 2}
"""

Layers = Mapping[str, Sequence[nn.Parameter]]
Treatment = Callable[[Sequence[nn.Parameter], torch.Generator], None]


def train(net: nn.Module, steps: Iterable[int], total: int, sparse: Iterable[nn.Parameter] = ()) -> None:
    """Steps of a schedule of `total` steps; gradients of `sparse` keep their largest entries."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 30) * (1 - 0.9 * step / total)
        optimizer.zero_grad()
        net(**samples(step * BATCH, BATCH)).loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for parameter in sparse:
            _keep_largest(parameter)
        optimizer.step()


def _keep_largest(parameter: nn.Parameter) -> None:
    gradient = parameter.grad
    if gradient is not None:
        limit = gradient.abs().flatten().topk(max(1, round(KEPT * gradient.numel()))).values[-1]
        gradient[gradient.abs() < limit] = 0.0


@torch.no_grad()
def unseen_loss(net: nn.Module) -> float:
    return float(net(**samples(TEST_SEED * 2, UNSEEN)).loss)


def four_bits(parameters: Sequence[nn.Parameter], draw: torch.Generator) -> None:
    for matrix in (parameter for parameter in parameters if parameter.dim() > 1):
        rows = matrix.flatten(1)
        scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / 7
        matrix.copy_((torch.round(rows / scale) * scale).view_as(matrix))


def eight_bits(parameters: Sequence[nn.Parameter], draw: torch.Generator) -> None:
    for matrix in (parameter for parameter in parameters if parameter.dim() > 1):
        scale = matrix.abs().max() / torch.finfo(torch.float8_e4m3fn).max
        matrix.copy_((matrix / scale).to(torch.float8_e4m3fn).float() * scale)


def noise_of(norm: float) -> Treatment:
    def add(parameters: Sequence[nn.Parameter], draw: torch.Generator) -> None:
        noise = [torch.randn(parameter.shape, generator=draw) for parameter in parameters]
        length = torch.stack([part.norm() for part in noise]).norm()
        for parameter, part in zip(parameters, noise, strict=True):
            parameter.add_(part * (norm / length))

    return add


@torch.no_grad()
def increase(net: nn.Module, parameters: Sequence[nn.Parameter], treat: Treatment, draws: int) -> float:
    """Mean increase of the loss when these parameters alone are treated."""
    kept, before, after = [parameter.clone() for parameter in parameters], unseen_loss(net), 0.0
    for number in range(draws):
        treat(parameters, torch.Generator().manual_seed(number))
        after += unseen_loss(net) / draws
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
    return after - before


def norm_of(parameters: Sequence[nn.Parameter]) -> float:
    return float(torch.stack([parameter.detach().norm() for parameter in parameters]).norm())


def measure(net: nn.Module, folder: Path) -> tuple[Measured, nn.Module, Layers]:
    """By the command's own functions; and the model that was measured, with its layers."""
    net.save_pretrained(folder / "weights")  # type: ignore[operator]
    (folder / "config.json").write_text(json.dumps(net.config.to_dict()))  # type: ignore[operator,union-attr]
    (folder / "digits.yaml").write_text(SCENARIO)
    question = Question(
        scenario=folder / "digits.yaml",
        job=ROOT / "benchmarks" / "digit_captions.py",
        weights=folder / "weights",
        output=folder / "sensitivity.json",
        device="cpu",
        settings=Settings(samples=16, microbatch=16, batches=2, seeds=2, iterations=30),
    )
    prepared = prepare(question, torch.device("cpu"), print)
    return finish(prepared, lambda key, value: None), prepared.subject.model, prepared.layers


def sparse_increases(
    half: nn.Module, zone: set[str], names: Mapping[str, Sequence[str]], steps: int, seed: int
) -> tuple[float, float]:
    """Loss after training on with top-k gradients in the zone, and in as many other layers, over that without.

    Args:
        half: the model after half of `steps`.
        names: layer -> its parameters.
    """
    others = random.Random(seed).sample(sorted(names.keys() - zone), len(zone))
    found = []
    for chosen in ((), sorted(zone), others):
        net = deepcopy(half)
        sparse = [net.get_parameter(name) for layer in chosen for name in names[layer]]
        train(net, range(steps // 2, steps // 2 + SPARSE_STEPS), steps, sparse)
        found.append(unseen_loss(net))
    return found[1] - found[0], found[2] - found[0]


def one_model(seed: int, steps: int) -> tuple[dict[str, tuple[float, float, float | None]], dict[str, Any]]:
    """Treatment -> increase inside, outside, and the rank correlation; and what was measured."""
    net = model(seed)
    train(net, range(steps // 2), steps)
    half = deepcopy(net)
    train(net, range(steps // 2, steps), steps)
    net.eval()
    with TemporaryDirectory() as folder:
        found, measured_net, layers = measure(net, Path(folder))
    values = {one.layer: one.value for one in found.values if one.modality == "vision"}
    zone = found.sensitive()
    norm = 0.05 * sorted(norm_of(own) for own in layers.values())[len(layers) // 2]
    rows: dict[str, tuple[float, float, float | None]] = {}
    treatments: dict[str, tuple[Treatment, int]] = {
        "4-bit weights": (four_bits, 1),
        "FP8 weights": (eight_bits, 1),
        "equal noise": (noise_of(norm), DRAWS),
    }
    for name, (treat, draws) in treatments.items():
        by_layer = {layer: increase(measured_net, own, treat, draws) for layer, own in layers.items()}
        inside = [value for layer, value in by_layer.items() if layer in zone]
        outside = [value for layer, value in by_layer.items() if layer not in zone]
        rows[name] = sum(inside) / len(inside), sum(outside) / len(outside), rank_correlation(values, by_layer)
    of_parameter = {id(parameter): name for name, parameter in measured_net.named_parameters()}
    names = {layer: [of_parameter[id(parameter)] for parameter in own] for layer, own in layers.items()}
    rows["top-k gradients"] = (*sparse_increases(half, zone, names, steps, seed), None)
    told = {"loss": unseen_loss(net), "zone": sorted(zone), "agreement": found.rank_correlation, "values": values}
    return rows, told


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=int, default=15)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    found = []
    for seed in range(options.models):
        rows, told = one_model(seed, options.steps)
        found.append(rows)
        print(seed, told, rows)
    table = []
    for name in found[0]:
        inside, outside = ([rows[name][place] for rows in found] for place in (0, 1))
        mean, low, high = mean_interval([a - b for a, b in zip(inside, outside, strict=True)])
        ranks = [rank for rows in found if (rank := rows[name][2]) is not None]
        table.append(
            {
                "treatment": name,
                "models": options.models,
                "inside": f"{sum(inside) / len(inside):.5f}",
                "outside": f"{sum(outside) / len(outside):.5f}",
                "difference": f"{mean:.5f}",
                "low": "" if low is None else f"{low:.5f}",
                "high": "" if high is None else f"{high:.5f}",
                "larger_inside": sum(a > b for a, b in zip(inside, outside, strict=True)),
                "rank_correlation": f"{sum(ranks) / len(ranks):.2f}" if ranks else "",
                "machine": MACHINE,
            }
        )
    write_rows("zones.csv", table)
    print(*table, sep="\n")


if __name__ == "__main__":
    main()
