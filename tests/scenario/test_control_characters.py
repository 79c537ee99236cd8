"""Characters that YAML does not allow are answered with one sentence."""

from pathlib import Path

import pytest

from mmplan.errors import InputError
from mmplan.scenario.load import load_scenario


@pytest.mark.parametrize("character", ["\x00", "\x07", "\x1b", "\x7f", "\ufffe"])
def test_a_control_character_is_no_traceback(tmp_path: Path, character: str) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(f"name: a{character}b\n")
    with pytest.raises(InputError, match="not valid YAML"):
        load_scenario(file)
