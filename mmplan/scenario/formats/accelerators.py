"""Accelerators as tools print them: the catalogue device of a name, and the NVLinks of a chip."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

# One NVLink in one direction. NVIDIA white papers: P100 4 links and 160 GB/s both directions, V100 6 and 300, Turing 2
# and 100, A100 12 and 600, GA102 4 and 112.5, H100 18 and 900; data sheets: A30 200, A800 and H800 400, H100 NVL bridge
# 600, H200 NVL bridge
# 900, B200 and B300 18 links and 1.8 TB/s.
_NVLINK1, _NVLINK2, _NVLINK5, _GA102 = 20e9, 25e9, 50e9, 14.0625e9


@dataclass(frozen=True, slots=True)
class Chip:
    """What prints as `pattern`; `device` is None where the catalogue has none of it.

    `switched`: there are machines where NVSwitches give every pair all the links of a chip.
    """

    name: str
    pattern: str
    device: str | None
    nvlinks: int = 0
    nvlink_bytes_per_s: float = 0.0
    switched: bool = False


# A text goes to the first chip that it matches, so longer names stand before shorter ones.
CHIPS: tuple[Chip, ...] = (
    Chip("P100-SXM2", "P100-SXM2", None, 4, _NVLINK1),
    Chip("V100-SXM2-16", "V100-SXM2-16GB", "v100-sxm2-16", 6, _NVLINK2),
    Chip("V100-SXM", "V100-SXM[23](?:-32GB)?", "v100-sxm2-32", 6, _NVLINK2, True),
    Chip("V100-PCIe", "V100S?-PCIE|V100-FHHL", None),
    Chip("RTX 2080 Ti", "RTX 2080 Ti|TITAN RTX|Quadro RTX [568]000", None, 2, _NVLINK2),
    Chip("A800-SXM", "A800-SXM4-80GB", "a800-sxm-80", 8, _NVLINK2, True),
    Chip("A800-PCIe", r"A800 80GB PCIe|A800-PCIE|A800 40GB Active", None, 8, _NVLINK2),
    Chip("A100-SXM-40", "A100-SXM4?-40GB", "a100-sxm-40", 12, _NVLINK2, True),
    Chip("A100-SXM-80", "A100-SXM4?-80GB", "a100-sxm-80", 12, _NVLINK2, True),
    Chip("A100-PCIe-80", "A100[ -]80GB[ -]PCIe|A100-PCIE-80GB", "a100-pcie-80", 12, _NVLINK2),
    Chip("A100-PCIe-40", "A100-PCIE-40GB", "a100-pcie-40", 12, _NVLINK2),
    Chip("A30", r"NVIDIA A30\b", None, 4, _NVLINK2),
    Chip("A40", r"(?:NVIDIA|Tesla) A40\b", "a40", 4, _GA102),
    Chip("RTX 3090", r"RTX 3090\b(?! Ti)", "rtx-3090", 4, _GA102),
    Chip("RTX A6000", r"RTX A(?:6000|5500|5000|4500)\b", None, 4, _GA102),
    Chip("A10", r"NVIDIA A10G?\b", "a10"),
    Chip("RTX 4090", r"RTX 4090\b(?! D)", "rtx-4090"),
    Chip("L40S", r"NVIDIA L40S\b", "l40s"),
    Chip("H800-SXM", r"NVIDIA H800\b(?! PCIe| NVL)", "h800-sxm", 8, _NVLINK2, True),
    Chip("H100-NVL", r"NVIDIA H100 NVL\b", "h100-nvl", 12, _NVLINK2),
    Chip("H100-PCIe", r"NVIDIA H100 PCIe\b", "h100-pcie", 12, _NVLINK2),
    Chip("GH200", r"NVIDIA GH200\b", "gh200", 18, _NVLINK2, True),
    Chip("H100-SXM", r"NVIDIA H100 80GB HBM3\b|H100[ -]SXM", "h100-sxm", 18, _NVLINK2, True),
    Chip("H200", r"NVIDIA H200\b(?! NVL)", "h200", 18, _NVLINK2, True),
    Chip("H200-NVL", r"NVIDIA H200 NVL\b", None, 18, _NVLINK2),
    Chip("H20", r"NVIDIA H20\b", "h20", 18, _NVLINK2, True),
    Chip("GB300", r"NVIDIA GB300\b", "gb300", 18, _NVLINK5, True),
    Chip("GB200", r"NVIDIA GB200\b", "gb200", 18, _NVLINK5, True),
    Chip("B300", r"NVIDIA B300\b", None, 18, _NVLINK5, True),
    Chip("B200", r"NVIDIA B200\b", "b200", 18, _NVLINK5, True),
    Chip("MI325X", r"MI325X\b", "mi325x"),
    Chip("MI300X", r"MI300X\b", "mi300x"),
    Chip("MI250X", r"MI250X\b", "mi250x"),
)
_PATTERNS = [(chip, re.compile(chip.pattern, re.IGNORECASE)) for chip in CHIPS]
_ANY = re.compile("|".join(chip.pattern for chip in CHIPS), re.IGNORECASE)
_MAKER = re.compile(
    r"NVIDIA|Tesla|GeForce|Instinct|Radeon|Quadro|TITAN|[APV]\d00|H[128]00?|MI[23]\d|RTX", re.IGNORECASE
)
# Accelerators that are none of the chips above.
_OTHER = re.compile(
    r"(?:NVIDIA|Tesla|AMD (?:Instinct|INSTINCT)|AMD Radeon(?: Pro)?) "
    r"(?:(?:GeForce |RTX |PRO |Quadro |TITAN )+[A-Z]{0,2}\d{3,4}|[A-Z]{1,3}\d{1,4}[A-Z]{0,3})\b"
    r"(?: (?:Ti|SUPER|D|NVL|PCIe|Ada Generation)\b)?"
)
_MOST_CHARACTERS = 2000
_MOST_LINES = 20_000


def chips_named(lines: Iterable[str]) -> tuple[tuple[Chip, ...], tuple[str, ...]]:
    """The chips that lines name, each once, and names of accelerators that are none of these."""
    chips: dict[str, Chip] = {}
    others: dict[str, None] = {}
    looked_at = 0
    for line in lines:
        if not _MAKER.search(line[:_MOST_CHARACTERS]):
            continue
        looked_at += 1
        if looked_at > _MOST_LINES:  # of a training log whose every line names its device
            break
        rest = line[:_MOST_CHARACTERS]
        for chip, pattern in _PATTERNS if _ANY.search(rest) else ():
            found = pattern.sub("", rest)
            if found != rest:
                chips[chip.name], rest = chip, found
        others |= dict.fromkeys(match[0] for match in _OTHER.finditer(rest))
    return tuple(chips.values()), tuple(others)


def chip_of(device: str | None) -> Chip | None:
    """The chip of a device of the catalogue."""
    return next((chip for chip in CHIPS if chip.device == device), None) if device is not None else None


def chips_with_nvlinks(count: int) -> tuple[Chip, ...]:
    """Those that have `count` NVLinks in all."""
    return tuple(chip for chip in CHIPS if chip.nvlinks == count)
