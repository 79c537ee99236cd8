"""Hugging Face config.json files as a `Model`."""

from pathlib import Path

from mmplan.errors import InputError
from mmplan.scenario.scenario import Model


def bundled_configs() -> dict[str, Path]:
    """Names of the configs that come with mmplan."""
    folder = Path(__file__).parents[1] / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def read_hf_config(path: Path) -> Model:
    """The model of a config.json; InputError when its family is unknown."""
    raise InputError("unknown model_type", file=path)
