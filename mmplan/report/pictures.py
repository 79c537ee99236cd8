"""Pictures as PNG files that appear whole or not at all."""

import io
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mmplan.files import write_file


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches that needs no screen."""
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_png(figure: Figure, path: Path) -> None:
    """Write the figure; InputError where it cannot be written."""
    content = io.BytesIO()
    figure.savefig(content, format="png")
    write_file(path, content.getvalue())
