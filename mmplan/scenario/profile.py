"""A profile: what `mmplan calibrate` measured on one machine, as a file that a scenario can name.

Numbers are in base units, each with its range (P10 to P90), how it was found, from how many measurements, and the
median relative difference between these and what the number predicts.
"""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from mmplan.errors import InputError
from mmplan.files import write_file
from mmplan.scenario.catalogue import catalogue_device, device_names
from mmplan.scenario.cluster import Device, Link
from mmplan.scenario.document import Document, did_you_mean, listed, read_document, shown
from mmplan.scenario.origin import Origin, measured_origin
from mmplan.scenario.scenario import Model
from mmplan.scenario.schema_base import Strict

SCHEMA = "mmplan.profile/1"

# Parameters of a device that a profile can hold; attention fractions are `attention.KIND`.
_FRACTIONS = ("gemm_fraction", "memory_fraction", "update_fraction")
_RATES = ("fp32_flops_per_s", "bf16_flops_per_s", "fp16_flops_per_s", "memory_bytes_per_s")
_LINK = ("bytes_per_s", "latency_s")
_ATTENTION = "attention."

Positive = Annotated[float, Field(gt=0, le=1e21)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One number: `source` is `measured`, or `datasheet` for a peak that the catalogue knows."""

    value: float
    p10: float
    p90: float
    source: Literal["measured", "datasheet"]
    n: int
    residual: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One device (and the link between processes on it, where it was measured).

    `base`: the catalogue device that gives what was not measured. `refined_by` names a run that scaled the numbers;
    `modules`: seconds of a module's layers in that run over those of the cost model.
    """

    base: str
    device: str  # as the machine calls it
    kind: Literal["cpu", "cuda"]
    date: str
    quick: bool
    software: dict[str, str]
    parameters: dict[str, Measured]
    link: dict[str, Measured]
    modules: dict[str, Measured] = field(default_factory=dict)
    refined_by: str = ""


class MeasuredSpec(Strict):
    value: Positive
    p10: Positive
    p90: Positive
    source: Literal["measured", "datasheet"]
    n: Annotated[int, Field(ge=0)]
    residual: Annotated[float, Field(ge=0)]


class ProfileSpec(Strict):
    schema_: Literal["mmplan.profile/1"] = Field(alias="schema")
    base: str
    device: str
    kind: Literal["cpu", "cuda"]
    date: str
    quick: bool
    software: dict[str, str]
    parameters: dict[str, MeasuredSpec]
    link: dict[str, MeasuredSpec]
    modules: dict[str, MeasuredSpec] = Field(default_factory=dict)
    refined_by: str = ""


_PROFILE = TypeAdapter(ProfileSpec)


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile; the file appears whole or not at all."""
    text = "# Written by `mmplan calibrate`. A scenario names it: `cluster: {profile: FILE, devices_per_node: N}`.\n"
    write_file(path, text + yaml.safe_dump(_short(profile_document(profile)), sort_keys=False, width=120))


def _short(value: object) -> object:
    """Numbers with six digits: no measurement has more, and rounding keeps their order."""
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def profile_document(profile: Profile) -> dict[str, object]:
    """The profile as plain values, under its schema name."""
    return {"schema": SCHEMA, **asdict(profile)}


def load_profile(path: Path) -> Profile:
    """Read a profile.

    Raises:
        InputError: one sentence with file, line and key.
    """
    document = read_document(path)
    try:
        spec = _PROFILE.validate_python(document.values)
    except ValidationError as error:
        raise _bad(document, error) from None
    if spec.base not in device_names():
        hint = did_you_mean(spec.base, device_names()) or f"; known: {listed(device_names(), 40)}"
        raise document.error(("base",), f"unknown device {shown(spec.base)}{hint}")
    parameters = {name: _measured(("parameters", name), item, document) for name, item in spec.parameters.items()}
    link = {name: _measured(("link", name), item, document) for name, item in spec.link.items()}
    if link and set(link) != set(_LINK):
        raise document.error(("link",), f"expected {listed(_LINK)}, found {listed(link)}")
    modules = {name: _in_range(("modules", name), item, document) for name, item in spec.modules.items()}
    own = spec.model_dump(by_alias=False, exclude={"schema_", "parameters", "link", "modules"})
    return Profile(**own, parameters=parameters, link=link, modules=modules)


def paced(model: Model, profile: Profile) -> Model:
    """The model at the pace that the profile saw; modules that it does not name keep theirs."""
    pace = {name: item.value for name, item in profile.modules.items()}
    modules = tuple(replace(m, time_factor=pace.get(m.name, m.time_factor)) for m in model.modules)
    return replace(model, modules=modules)


def profile_device(profile: Profile, source: str) -> Device:
    """The base device with what was measured in its place."""
    base = catalogue_device(profile.base).device
    plain = {name: item.value for name, item in profile.parameters.items() if not name.startswith(_ATTENTION)}
    kinds = {
        name.removeprefix(_ATTENTION): item.value
        for name, item in profile.parameters.items()
        if name.startswith(_ATTENTION)
    }
    origins = tuple(origin for origin in base.origins if origin.parameter not in profile.parameters)
    return replace(
        base,
        **plain,  # type: ignore[arg-type]
        attention=tuple({**dict(base.attention), **kinds}.items()),
        attention_fraction=kinds.get("flash2", base.attention_fraction),
        origins=(*origins, *_origins(profile.parameters)),
        source=f"{source}: {profile.device}, {profile.date}",
    )


def profile_link(profile: Profile, source: str) -> Link | None:
    """The measured link, None where none was."""
    if not profile.link:
        return None
    bandwidth, latency = (profile.link[name] for name in _LINK)
    return Link(
        bytes_per_s=bandwidth.value,
        latency_s=latency.value,
        fraction=1.0,
        source=f"{source}: {profile.device}, {profile.date}",
        origins=_origins(profile.link),
    )


def _origins(parameters: dict[str, Measured]) -> tuple[Origin, ...]:
    return tuple(
        measured_origin(name, item.value, item.p10, item.p90)
        for name, item in parameters.items()
        if item.source == "measured"
    )


def _measured(at: tuple[str, str], item: MeasuredSpec, document: Document) -> Measured:
    """A number whose name is known and whose range holds it."""
    where, name = at
    kinds = tuple(_ATTENTION + kind for kind, _ in catalogue_device("h100-sxm").device.attention)
    known = (*_RATES, *_FRACTIONS, "launch_s", *kinds) if where == "parameters" else _LINK
    if name not in known:
        hint = did_you_mean(name, known) or f"; known: {listed(known, 40)}"
        raise document.error(at, f"unknown parameter{hint}")
    fraction = name in _FRACTIONS or name.startswith(_ATTENTION)
    if fraction and item.value > 1:
        raise document.error((*at, "value"), f"expected a fraction of at most 1, found {item.value}")
    return _in_range(at, item, document)


def _in_range(at: tuple[str, str], item: MeasuredSpec, document: Document) -> Measured:
    if not item.p10 <= item.value <= item.p90:
        raise document.error(at, f"expected p10 <= value <= p90, found {item.p10} <= {item.value} <= {item.p90}")
    return Measured(**item.model_dump())


def _bad(document: Document, error: ValidationError) -> InputError:
    """The first finding as one sentence."""
    first = error.errors(include_url=False)[0]
    path = tuple(part for part in first["loc"])
    if first["type"] == "unknown_key":
        context = first["ctx"]
        return document.error((*path, context["key"]), f"unknown key{context['hint']}")
    if first["type"] == "missing":
        return document.error(path, "this key is missing")
    message = first["msg"]
    return document.error(path, f"{message[:1].lower()}{message[1:]}, found {shown(first['input'])}")
