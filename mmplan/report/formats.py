"""What importers read and exporters wrote, as tables, documents and files."""

import csv
import io
from pathlib import Path
from textwrap import wrap

import yaml
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mmplan.errors import InputError
from mmplan.files import make_folder, require_folder, write_file
from mmplan.planner.formats.exported import Exported
from mmplan.runtime.formats.job import LaunchJob
from mmplan.scenario.formats.reading import Reading
from mmplan.units import format_seconds

WIDTH = 120


def fragment_text(reading: Reading) -> str:
    """The fragment as YAML, under comments that say what it is and what became of the rest of the files."""
    comments = [f"{reading.document[:1].upper()}{reading.document[1:]}, read by `mmplan import {reading.kind}`."]
    comments += [f"{word}: {sentence}" for word, sentence in _told(reading)]
    wrapped = [line for comment in comments for line in wrap(comment, WIDTH - 2, break_long_words=False)]
    values = yaml.safe_dump(dict(reading.fragment), sort_keys=False, width=WIDTH, allow_unicode=True)
    return "".join(f"# {line}\n" for line in wrapped) + values


def reading_text(reading: Reading, target: Path) -> str:
    """What is written to a file: YAML, or a table of one row where its name ends in .csv.

    Raises:
        InputError: a table of something that is no measured run.
    """
    if target.suffix.lower() != ".csv":
        return fragment_text(reading)
    row = reading.fragment.get("row")
    if not isinstance(row, dict):
        raise InputError(f"a {reading.document} is no row of a table; write it as YAML", file=target)
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows((row.keys(), row.values()))
    return table.getvalue()


def _told(reading: Reading) -> list[tuple[str, str]]:
    words = {"read": reading.read, "ignored": reading.ignored, "warning": reading.warnings}
    return [(word, _plain(sentence)) for word, sentences in words.items() for sentence in sentences]


def _plain(sentence: str) -> str:
    """On one line, without characters that a terminal obeys or YAML refuses: files of others have them in names."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(sentence.split()))


def reading_document(reading: Reading) -> dict[str, object]:
    """`mmplan.import/1`."""
    return {
        "schema": "mmplan.import/1",
        "kind": reading.kind,
        "document": reading.document,
        "fragment": dict(reading.fragment),
        "read": list(reading.read),
        "ignored": list(reading.ignored),
        "warnings": list(reading.warnings),
    }


def reading_parts(reading: Reading, target: Path | None) -> list[RenderableType]:
    """What was read, ignored and warned of; the whole text where it goes to no file."""
    if target is None:
        return [Text(fragment_text(reading).rstrip(), no_wrap=True)]
    grid = Table.grid(padding=(0, 2))
    for word, sentence in _told(reading):
        grid.add_row(word, Text(sentence))
    grid.add_row("written", Text(f"{target} ({reading.document})"))
    return [grid]


def export_document(made: Exported, written: tuple[Path, ...]) -> dict[str, object]:
    """`mmplan.export/1`."""
    return {
        "schema": "mmplan.export/1",
        "target": made.target,
        "version": made.version,
        "files": [str(path) for path in written] or dict(made.files),
        "losses": [{"sentence": loss.sentence, "step_s": loss.step_s} for loss in made.losses],
        "notes": list(made.notes),
    }


def launch_document(job: LaunchJob, made: Exported, written: tuple[Path, ...]) -> dict[str, object]:
    """`mmplan.launch/1`: the files as of an export, and how many processes run on which nodes."""
    groups = [{"nodes": g.nodes, "processes": g.processes, "device": g.device} for g in job.groups]
    counts = {"processes": job.processes, "nodes": job.nodes, "groups": groups}
    return {**export_document(made, written), "schema": "mmplan.launch/1", **counts}


def export_parts(made: Exported, written: tuple[Path, ...]) -> list[RenderableType]:
    """The files themselves where they were not written, then losses with their price, and notes."""
    parts: list[RenderableType] = []
    if not written:
        parts += [
            Text(content if len(made.files) == 1 else f"# {name}\n{content}", no_wrap=True)
            for name, content in made.files.items()
        ]
    grid = Table.grid(padding=(0, 2))
    for loss in made.losses:
        price = "unknown" if loss.step_s is None else f"{format_seconds(loss.step_s)} a step"
        grid.add_row("loss", Text(f"{loss.sentence} (price: {price})"))
    for note in made.notes:
        grid.add_row("note", Text(note))
    for path in written:
        grid.add_row("written", Text(f"{path} (for {made.version})"))
    return [*parts, grid]


def write_export(made: Exported, output: Path | None) -> tuple[Path, ...]:
    """One file at `output`, or several in the folder `output`; nothing without it.

    Raises:
        InputError: cannot be written there.
    """
    if output is None:
        return ()
    if len(made.files) == 1 and not output.is_dir():
        require_folder(output)
        write_file(output, next(iter(made.files.values())))
        return (output,)
    make_folder(output)
    for name, content in made.files.items():
        write_file(output / name, content)
    return tuple(output / name for name in made.files)
