"""How long `mmplan optimize` takes as devices, layers and modalities grow, as whole commands.

    python benchmarks/growth.py            # prints a table, rewrites benchmarks/growth.csv and benchmarks/growth.png

Each axis grows alone from one invented model: a vision encoder of 24 layers before a language model of 32 layers
(hidden 4096), 64 nodes of 8 H100, 4 samples a device in a step. Modalities are added as encoders of 12 layers with a
projector each. Seconds are wall time with the start of Python, the faster of two runs; `ratio` is over the first row
of the axis.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib
import yaml
from measured import MACHINE, ROOT, timed_optimize, write_rows

matplotlib.use("Agg")
from matplotlib import pyplot

NODES, LAYERS, ENCODERS = 64, 32, 1  # the model that each axis grows from
AXES = {
    "devices": [{"nodes": nodes} for nodes in (1, 4, 16, 64, 256, 1024)],
    "layers": [{"layers": layers} for layers in (16, 32, 64, 128, 256, 512)],
    "modalities": [{"encoders": encoders} for encoders in (0, 1, 2, 3, 4)],
}
DEVICES_PER_NODE = 8
SAMPLES_PER_DEVICE = 4


def scenario(nodes: int = NODES, layers: int = LAYERS, encoders: int = ENCODERS) -> dict[str, Any]:
    """The scenario of one point, as YAML values."""
    block = {"hidden": 1024, "heads": 16, "ffn": 4096}
    vision = {"kind": "vision_encoder", **block, "patch": 14, "image_size": 336}
    audio = {"kind": "audio_encoder", **block, "mel_bins": 128}
    modules: dict[str, Any] = {}
    edges = []
    for index in range(encoders):
        encoder = audio if index % 2 else vision
        modules[f"encoder{index}"] = {**encoder, "layers": 24 if index == 0 else 12}
        modules[f"projector{index}"] = {"kind": "projector", "dims": [1024, 4096]}
        edges += [[f"encoder{index}", f"projector{index}"], [f"projector{index}", "llm"]]
    llm = {"hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocabulary": 128256}
    modules["llm"] = {"kind": "language_model", "layers": layers, **llm}
    data: dict[str, Any] = {"text_tokens": 2048}
    if encoders > 0:
        data["images"] = 1
    if encoders > 1:
        data |= {"audio_clips": 1, "audio_seconds": 10}
    return {
        "name": "growth",
        "source": "invented",
        "model": {"modules": modules, "edges": edges},
        "data": data,
        "batch": {"global": nodes * DEVICES_PER_NODE * SAMPLES_PER_DEVICE},
        "precision": "bf16",
        "cluster": {"device": "h100-sxm", "nodes": nodes, "devices_per_node": DEVICES_PER_NODE},
    }


def measure(axis: str, point: dict[str, int]) -> dict[str, object]:
    """One row: wall seconds of the whole command, and what it found."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "growth.yaml"
        file.write_text(yaml.safe_dump(scenario(**point)))
        found, wall_s = timed_optimize(file)
    nodes, layers, encoders = ({"nodes": NODES, "layers": LAYERS, "encoders": ENCODERS} | point).values()
    return {
        "axis": axis,
        "devices": nodes * DEVICES_PER_NODE,
        "llm_layers": layers,
        "modalities": encoders + 1,
        "configurations": found["considered"]["enumerated"],
        "solved": found["considered"]["solved"],
        "gap": f"{found['gap']:.4%}",
        "wall_s": f"{wall_s:.2f}",
    }


def plot(rows: list[dict[str, object]]) -> None:
    """Seconds over each axis, side by side with one scale of seconds."""
    figure, panels = pyplot.subplots(1, 3, figsize=(11, 3.4), sharey=True, layout="constrained")
    columns = {"devices": "devices", "layers": "llm_layers", "modalities": "modalities"}
    for panel, (axis, column) in zip(panels, columns.items(), strict=True):
        points = [row for row in rows if row["axis"] == axis]
        panel.plot([row[column] for row in points], [float(str(row["wall_s"])) for row in points], marker="o")
        panel.set_xlabel({"layers": "layers of the language model"}.get(axis, axis))
        panel.grid(alpha=0.3)
        if axis != "modalities":
            panel.set_xscale("log", base=2)
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("mmplan optimize, wall s")
    figure.savefig(ROOT / "benchmarks" / "growth.png", dpi=110)


def main() -> None:
    rows: list[dict[str, object]] = []
    for axis, points in AXES.items():
        first = None
        for point in points:
            row = measure(axis, point)
            first = first or float(str(row["wall_s"]))
            row["ratio"] = f"{float(str(row['wall_s'])) / first:.2f}"
            row["machine"] = MACHINE
            rows.append(row)
            print(*list(row.values())[:9], sep="\t", flush=True)
    write_rows("growth.csv", rows)
    plot(rows)


if __name__ == "__main__":
    main()
