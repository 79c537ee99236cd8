"""The uncertain numbers among the rules that turn operators into seconds, and the rules with one of them moved."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mmplan.cost_models.time_rules import Rules
from mmplan.scenario.cluster import Device, Link
from mmplan.scenario.origin import Kind, Origin
from mmplan.scenario.stacks import parameter_origins

_ATTENTION = "attention."
_SHARES = ("exposed_", "gemm_fraction", "memory_fraction", "update_fraction", "fraction", "attention.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Uncertain:
    """One number with a range: `owner` is `device`, `node_link`, `network_link` or `stack`, `of` its name."""

    owner: str
    of: str
    parameter: str
    kind: Kind
    value: float
    p10: float
    p90: float


def uncertain_numbers(rules: Rules) -> tuple[Uncertain, ...]:
    """All numbers with a range that these rules use: of attention only the implementation in use."""
    return tuple(number for number in _listed(rules) if number.p10 < number.value or number.p90 > number.value)


def _listed(rules: Rules) -> Iterator[Uncertain]:
    attention = _ATTENTION + rules.technique.attention
    for origin in rules.device.origins:
        if origin.parameter.startswith(_ATTENTION) and origin.parameter != attention:
            continue
        value = _device_value(rules.device, origin.parameter)
        if value:
            yield _uncertain("device", rules.device.name, origin, value)
    for owner, link in (("node_link", rules.node_link), ("network_link", rules.network_link)):
        for origin in link.origins:
            yield _uncertain(owner, owner.replace("_", " "), origin, getattr(link, origin.parameter))
    for origin in parameter_origins(rules.technique.stack):
        value = getattr(rules.stack, origin.parameter)
        if value:
            yield _uncertain("stack", rules.technique.stack, origin, value)


def _uncertain(owner: str, of: str, origin: Origin, value: float) -> Uncertain:
    most = 1.0 if origin.parameter.startswith(_SHARES) else float("inf")
    return Uncertain(
        owner=owner,
        of=of,
        parameter=origin.parameter,
        kind=origin.kind,
        value=value,
        p10=value * origin.p10,
        p90=max(value, min(most, value * origin.p90)),
    )


def with_number(rules: Rules, number: Uncertain, value: float) -> Rules:
    """The rules with that number at `value`."""
    match number.owner:
        case "device":
            return replace(rules, device=_moved_device(rules.device, number.parameter, value))
        case "node_link":
            return replace(rules, node_link=_moved_link(rules.node_link, number.parameter, value))
        case "network_link":
            return replace(rules, network_link=_moved_link(rules.network_link, number.parameter, value))
        case _:
            return replace(rules, stack=replace(rules.stack, **{number.parameter: value}))  # type: ignore[arg-type]


def _device_value(device: Device, parameter: str) -> float | None:
    if parameter.startswith(_ATTENTION):
        return dict(device.attention).get(parameter.removeprefix(_ATTENTION), device.attention_fraction)
    value: float | None = getattr(device, parameter)
    return value


def _moved_device(device: Device, parameter: str, value: float) -> Device:
    if not parameter.startswith(_ATTENTION):
        return replace(device, **{parameter: value})  # type: ignore[arg-type]
    kind = parameter.removeprefix(_ATTENTION)
    return replace(device, attention=tuple({**dict(device.attention), kind: value}.items()))


def _moved_link(link: Link, parameter: str, value: float) -> Link:
    return replace(link, **{parameter: value})  # type: ignore[arg-type]
