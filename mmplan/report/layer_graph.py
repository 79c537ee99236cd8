"""The layer graph of a plan as a picture: modules as rows of layers, coloured by stage, zones framed with a price."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from mmplan.planner.plan import Plan
from mmplan.planner.shadow_price import ALL, ZonePrice
from mmplan.report.pictures import new_figure, save_png
from mmplan.scenario.asked import Zone
from mmplan.scenario.layer_ids import last_layer_id, module_layer_ids
from mmplan.units import format_seconds

# Light and dark by turns, so that neighbouring stages differ in print too (Paul Tol's "light" scheme, reordered).
_STAGES = ("#77AADD", "#EEDD88", "#AAAA00", "#FFAABB", "#44BB99", "#EE8866", "#99DDFF", "#BBCC33")
_ZONE, _EDGE, _HEIGHT = "#CC3311", "#888888", 0.42
_MOST_LABELLED = 40  # layers of the longest module; of more only every n-th is named

_Place = tuple[float, float]


def plot_layers(plan: Plan, prices: Sequence[ZonePrice], path: Path) -> None:
    """Write a PNG. `prices`: of zones, where they were asked for."""
    rows = {module.name: module_layer_ids(module) for module in plan.scenario.model.modules}
    longest = max(map(len, rows.values()))
    places = {layer: (float(i), -float(y)) for y, layers in enumerate(rows.values()) for i, layer in enumerate(layers)}
    figure = new_figure(min(16.0, max(6.0, 0.5 * longest + 2)), 1.0 * len(rows) + 1.2)
    axes = figure.subplots()
    _draw_edges(axes, plan, places)
    _draw_layers(axes, plan, rows, places, longest)
    priced = {price.zone: price for price in prices}
    for zone in plan.scenario.constraints.zones:
        _draw_zone(axes, zone, priced.get(zone.name), rows, places)
    axes.set_xlim(-0.7, longest - 0.3)
    axes.set_ylim(-len(rows) + 0.35, 0.75)
    axes.set_yticks([-y for y in range(len(rows))], list(rows))
    axes.set_xticks([])
    axes.set_frame_on(False)
    axes.tick_params(left=False)
    axes.set_title(_title(plan, priced), fontsize=10, loc="left")
    save_png(figure, path)


def _draw_layers(
    axes: Axes, plan: Plan, rows: Mapping[str, Sequence[str]], places: Mapping[str, _Place], longest: int
) -> None:
    """Boxes of layers; stages are named once in each module that they are in, cuts inside a module are dark lines."""
    stage_of, every = plan.stage_of_layer(), 1 + longest // _MOST_LABELLED
    for module, layers in rows.items():
        for index, layer in enumerate(layers):
            x, y = places[layer]
            stage = stage_of[layer]
            colour = _STAGES[stage % len(_STAGES)]
            axes.add_patch(Rectangle((x - 0.5, y - _HEIGHT / 2), 1, _HEIGHT, fc=colour, ec="white", lw=0.6, zorder=2))
            if index % every == 0 or not layer.rpartition(".")[2].isdigit():
                name = layer.removeprefix(f"{module}.")
                axes.text(x, y, name, ha="center", va="center", fontsize=6.5 if every == 1 else 5, zorder=4)
            if index and stage_of[layers[index - 1]] != stage:
                axes.plot([x - 0.5] * 2, [y - _HEIGHT * 0.7, y + _HEIGHT * 0.7], color="black", lw=2, zorder=5)
        for stage, run in groupby(layers, key=stage_of.__getitem__):
            own = list(run)
            middle = (places[own[0]][0] + places[own[-1]][0]) / 2
            below = places[own[0]][1] - _HEIGHT * 0.62 - 0.03
            axes.text(middle, below, f"stage {stage}", ha="center", va="top", fontsize=6.5, color="#444444")


def _draw_edges(axes: Axes, plan: Plan, places: Mapping[str, _Place]) -> None:
    """From the last layer of a module that another reads to the first of that one."""
    model = plan.scenario.model
    for edge in model.edges:
        start = places[last_layer_id(model.module(edge.producer))]
        end = places[module_layer_ids(model.module(edge.consumer))[0]]
        sign = -1 if end[1] < start[1] else 1
        arrow = FancyArrowPatch(
            (start[0], start[1] + sign * _HEIGHT / 2),
            (end[0], end[1] - sign * _HEIGHT / 2),
            arrowstyle="-|>",
            mutation_scale=9,
            color=_EDGE,
            lw=1,
            zorder=1,
        )
        axes.add_patch(arrow)


def _draw_zone(
    axes: Axes, zone: Zone, price: ZonePrice | None, rows: Mapping[str, Sequence[str]], places: Mapping[str, _Place]
) -> None:
    """A frame around each run of its layers, what it costs above the first."""
    own = set(zone.layers)
    first = True
    for layers in rows.values():
        for is_inside, run in groupby(layers, key=own.__contains__):
            inside = list(run)
            if not is_inside:
                continue
            (x, y), (end, _) = places[inside[0]], places[inside[-1]]
            frame = Rectangle((x - 0.5, y - _HEIGHT * 0.62), end - x + 1, _HEIGHT * 1.24, fill=False, zorder=6)
            frame.set(edgecolor=_ZONE, linewidth=1.8)
            axes.add_patch(frame)
            if first:
                text = f"zone {zone.name}{_price_text(price)}"
                axes.text(x - 0.5, y + _HEIGHT * 0.68, text, fontsize=7, color=_ZONE, va="bottom", zorder=6)
            first = False


def _price_text(price: ZonePrice | None) -> str:
    if price is None or price.price_s is None:
        return ""
    return f": +{format_seconds(price.price_s)} per step" if price.price_s > 0 else ": costs nothing"


def _title(plan: Plan, priced: Mapping[str, ZonePrice]) -> str:
    together = priced.get(ALL)
    told = f"; all zones{_price_text(together)}" if together is not None and together.price_s else ""
    return f"Layers of {plan.scenario.name} by stage{told}"
