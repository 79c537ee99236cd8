"""The only place where units are converted.

Inside mmplan every quantity is in base units (seconds, bytes, FLOP, per second) and says so in its name. Files accept
`80 GiB`, `400 Gb/s`, `10 us`, `989 TFLOP/s`; `b` is bits, `B` is bytes, `Gi` is 2^30 and `G` is 10^9.
"""

import re

S_PER_HOUR = 3600.0
_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_PREFIX = {**_DECIMAL, **_BINARY}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": S_PER_HOUR}
_QUANTITY = re.compile(r"^\s*([+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-zµ/]*)\s*$")


def _split(text: str, expected: str) -> tuple[float, str]:
    match = _QUANTITY.match(text)
    if match is None:
        raise ValueError(f"expected {expected}, found '{text}'")
    return float(match.group(1)), match.group(2)


def _prefixed(text: str, suffixes: dict[str, float], expected: str) -> float:
    value, unit = _split(text, expected)
    for suffix, factor in suffixes.items():
        prefix = unit.removesuffix(suffix)
        if unit.endswith(suffix) and prefix in _PREFIX:
            return value * _PREFIX[prefix] * factor
    raise ValueError(f"expected {expected}, found '{text}'")


def parse_bytes(text: str) -> int:
    """Bytes of `80 GiB`, `80 GB`, `512 B`. Raises ValueError with what was expected."""
    return round(_prefixed(text, {"B": 1.0}, "a size such as '80 GiB'"))


def parse_bytes_per_s(text: str) -> float:
    """Bytes per second of `900 GB/s` (bytes) or `400 Gb/s`, `400 Gbps` (bits)."""
    suffixes = {"B/s": 1.0, "b/s": 0.125, "bit/s": 0.125, "bps": 0.125}
    return _prefixed(text, suffixes, "a bandwidth such as '900 GB/s' or '400 Gb/s'")


def parse_flops_per_s(text: str) -> float:
    """FLOP per second of `989 TFLOP/s` or `989 TFLOPS`."""
    return _prefixed(text, {"FLOP/s": 1.0, "FLOPS": 1.0, "FLOPs": 1.0}, "a rate such as '989 TFLOP/s'")


def parse_seconds(text: str) -> float:
    """Seconds of `10 us`, `1.5 ms`, `30 s`."""
    value, unit = _split(text, "a time such as '10 us'")
    if unit not in _SECONDS:
        raise ValueError(f"expected a time such as '10 us', found '{text}'")
    return value * _SECONDS[unit]


def microseconds(seconds: float) -> float:
    """For file formats that count in microseconds."""
    return seconds / _SECONDS["us"]


def seconds_of_milliseconds(milliseconds: float) -> float:
    """From interfaces that count in milliseconds."""
    return milliseconds * _SECONDS["ms"]


def nanoseconds_of_microseconds(microseconds: float) -> int:
    """Whole nanoseconds; exact for integers."""
    return microseconds * 1000 if isinstance(microseconds, int) else round(microseconds * 1000)


def nanoseconds_of_seconds(seconds: float) -> int:
    """Whole nanoseconds."""
    return round(seconds / _SECONDS["ns"])


def seconds_of_nanoseconds(nanoseconds: float) -> float:
    """From profilers, which count in nanoseconds."""
    return nanoseconds * _SECONDS["ns"]


def seconds_of_unit(value: float, unit: str) -> float:
    """Of a table's column in `ns`, `us`, `ms` or `s`, also written `nsec` or `NS`. Raises ValueError for another."""
    return value * _unit(unit.lower().removesuffix("ec"), {name: _SECONDS[name] for name in ("ns", "us", "ms", "s")})


def bytes_of_unit(value: float, unit: str) -> float:
    """Of a table's column in `B`, `KB`, `MB`, `MiB`, in any case. Raises ValueError for another."""
    sizes = {f"{prefix}b".lower(): size for prefix, size in _PREFIX.items()}
    return value * _unit("b" if unit.lower() == "bytes" else unit.lower(), sizes)


def _unit(unit: str, known: dict[str, float]) -> float:
    if unit not in known:
        raise ValueError(f"expected a unit such as '{next(iter(known))}', found '{unit}'")
    return known[unit]


def gibibytes(size_bytes: float) -> float:
    """For the axes of charts."""
    return size_bytes / _PREFIX["Gi"]


def _scaled(value: float, steps: list[tuple[float, str]]) -> str:
    for size, name in steps:
        if abs(value) >= size:
            return f"{value / size:.3g} {name}" if abs(value) / size < 100 else f"{value / size:,.0f} {name}"
    size, name = steps[-1]
    return f"{value / size:.3g} {name}"


def format_bytes(value: float) -> str:
    """`format_bytes(85899345920) == '80 GiB'`."""
    return _scaled(value, [(2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")])


def format_seconds(value: float) -> str:
    """`format_seconds(0.0123) == '12.3 ms'`."""
    return _scaled(value, [(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")])


def format_ms(value: float) -> str:
    """`format_ms(0.0123) == '12.3'`: of seconds, for a column of milliseconds."""
    shown = value * 1e3
    return f"{shown:,.0f}" if shown >= 100 else f"{shown:.3g}"


def format_flops(value: float) -> str:
    """`format_flops(2.06e12) == '2.06 TFLOP'`."""
    return _scaled(value, [(1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1.0, "FLOP")])


def format_bytes_per_s(value: float) -> str:
    """`format_bytes_per_s(9e11) == '900 GB/s'`."""
    return _scaled(value, [(1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s")])
