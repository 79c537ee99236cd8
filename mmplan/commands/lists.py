"""Commands that print what mmplan knows."""

import json
import sys

from mmplan.commands.options import JsonFile, json_path
from mmplan.files import write_file


def schema(json_file: JsonFile = None) -> None:
    """Print the JSON Schema of scenario files, for editors."""
    from mmplan.scenario.schema import scenario_json_schema

    text, target = json.dumps(scenario_json_schema(), indent=1) + "\n", json_path(json_file)
    if target is None:
        sys.stdout.write(text)
    else:
        write_file(target, text)


def hardware(json_file: JsonFile = None) -> None:
    """List the devices of the bundled hardware catalogue with their sources."""
    from mmplan.report.console import emit
    from mmplan.report.documents import hardware_document
    from mmplan.report.tables import hardware_table
    from mmplan.scenario.catalogue import catalogue_device, device_names

    devices = [catalogue_device(name) for name in device_names()]
    emit(json_file, hardware_document(devices), hardware_table(devices))
