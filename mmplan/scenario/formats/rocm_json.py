"""`amd-smi topology --json`: a list of GPUs, each with its link to every GPU, itself included."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmplan.errors import InputError
from mmplan.scenario.document import shown
from mmplan.scenario.formats.launch.relaxed_json import relaxed_json
from mmplan.scenario.formats.rocm_matrix import MOST_DEVICES, RocmTopology

_SELF, _TYPES = "SELF", ("XGMI", "PCIE")


def read_rocm_json(path: Path) -> RocmTopology:
    """The host of a file.

    Raises:
        InputError: no JSON of such a list, a link that is missing, or two that disagree.
    """
    values, _ = relaxed_json(path, "topology")
    if not isinstance(values, list) or not values:
        raise InputError(f"expected the list of 'amd-smi topology --json', found {shown(values)}", file=path)
    if len(values) > MOST_DEVICES:
        raise InputError(f"{len(values):,} GPUs; a node has at most {MOST_DEVICES}", file=path)
    labels = [str(_field(gpu, "bdf", path)) for gpu in values]
    places = {label: place for place, label in enumerate(labels)}
    if len(places) < len(labels):
        raise InputError("the same bdf stands twice", file=path)
    links = {row: _links(gpu, places, path) for row, gpu in enumerate(values)}
    types: dict[tuple[int, int], str] = {}
    hops: dict[tuple[int, int], int] = {}
    weights: dict[tuple[int, int], int] = {}
    for row in links:
        for column in range(row):
            one, other = links[row][column], links[column][row]
            kinds = [str(link.get("link_type", "")).upper() for link in (one, other)]
            if kinds[0] != kinds[1]:
                told = f"{labels[column]} and {labels[row]} are joined by {kinds[1][:20]} and by {kinds[0][:20]}"
                raise InputError(f"{told}: the matrix is not symmetric", file=path)
            enabled = str(one.get("link_status", "ENABLED")).upper() == "ENABLED"
            types[column, row] = kinds[0] if kinds[0] in _TYPES and enabled else "?"
            for table, key in ((hops, "num_hops"), (weights, "weight")):
                if isinstance(one.get(key), int) and not isinstance(one.get(key), bool):
                    table[column, row] = one[key]
    return RocmTopology(
        file=path,
        line=1,
        gpus=tuple(labels),
        types=types,
        hops=hops,
        weights=weights,
        numa={},
        affinity={},
        cut=(),
    )


def _field(value: Any, key: str, path: Path) -> Any:
    found = value.get(key) if isinstance(value, dict) else None
    if found is None:
        raise InputError(f"expected a mapping with '{key}' in the list of GPUs, found {shown(value)}", file=path)
    return found


def _links(gpu: Any, places: Mapping[str, int], path: Path) -> Mapping[int, Mapping[str, Any]]:
    """Column -> link of one GPU; every GPU has to stand there once."""
    given = _field(gpu, "links", path)
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise InputError(f"expected a list of links, found {shown(given)}", file=path)
    found: dict[int, Mapping[str, Any]] = {}
    for link in given:
        place = places.get(str(_field(link, "bdf", path)))
        if place is None or place in found:
            what = "stands twice" if place is not None else "is no GPU of the list"
            raise InputError(f"{shown(link['bdf'])} {what} in the links of {shown(gpu['bdf'])}", file=path)
        found[place] = link
    if len(found) < len(places):
        raise InputError(f"the links of {shown(gpu['bdf'])} are {len(found)} of {len(places)}", file=path)
    own = found[places[str(gpu["bdf"])]]
    if str(own.get("link_type", _SELF)).upper() != _SELF:
        raise InputError(f"the link of {shown(gpu['bdf'])} to itself is {shown(own['link_type'])}", file=path)
    return found
