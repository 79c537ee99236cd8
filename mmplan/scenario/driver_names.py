"""What CUDA and HIP drivers call the devices of the catalogue."""

import re

_DRIVER_NAMES = (
    (r"GB300", "gb300"),
    (r"GB200", "gb200"),
    (r"B200", "b200"),
    (r"H200", "h200"),
    (r"H100 PCIe", "h100-pcie"),
    (r"H100 NVL", "h100-nvl"),
    (r"H100", "h100-sxm"),
    (r"H800", "h800-sxm"),
    (r"H20\b", "h20"),
    (r"A100-SXM4-80GB", "a100-sxm-80"),
    (r"A100-SXM4-40GB", "a100-sxm-40"),
    (r"A100 80GB PCIe", "a100-pcie-80"),
    (r"A100-PCIE-40GB", "a100-pcie-40"),
    (r"A800", "a800-sxm-80"),
    (r"A40\b", "a40"),
    (r"A10\b", "a10"),
    (r"V100-SXM2-16GB", "v100-sxm2-16"),
    (r"V100-SXM[23]-32GB", "v100-sxm2-32"),
    (r"L40S", "l40s"),
    (r"RTX 4090", "rtx-4090"),
    (r"RTX 3090", "rtx-3090"),
    (r"MI300X", "mi300x"),
    (r"MI325X", "mi325x"),
    (r"MI250X", "mi250x"),
)


def device_of_driver(name: str) -> str | None:
    """The catalogue's name of a device, None where the catalogue has none that the driver calls so."""
    return next((device for pattern, device in _DRIVER_NAMES if re.search(pattern, name)), None)
