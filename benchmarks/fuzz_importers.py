"""How importers stand damage: real files with lines, columns, numbers and bytes lost, doubled, moved or replaced.

    python benchmarks/fuzz_importers.py FOLDER [--minutes 10] [--kind nccl ...] [--seed 0]

FOLDER holds one folder per kind of files. Every mutant must give a reading whose values are finite and can be written
as YAML, or one sentence of refusal; anything else (another exception, more than 20 seconds) is printed with the seed of
the mutant and counted as a crash. Rewrites the rows of these folders in benchmarks/fuzz_importers.csv.
"""

import argparse
import csv
import gzip
import math
import random
import signal
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import yaml
from measured import ROOT, write_rows

from mmplan.commands.import_kinds import read_files
from mmplan.errors import MmplanError
from mmplan.report.formats import fragment_text

ROWS = "fuzz_importers.csv"
MOST_SECONDS = 20
MOST_BYTES = 3_000_000  # larger files are cut: a mutant has to be quick
WORDS = (
    "nan",
    "-1",
    "0",
    "1e308",
    "999999999999999999999",
    "",
    "N/A",
    "null",
    "true",
    "[",
    "}",
    "é",
    "\x1b[31m",
    "X" * 5000,
)


def lines_changed(text: str, draw: random.Random) -> str:
    """One or two lines lost, doubled, moved, cut or joined."""
    lines = text.split("\n")
    for _ in range(draw.randint(1, 2)):
        at, to = draw.randrange(len(lines)), draw.randrange(len(lines))
        change = draw.randrange(5)
        if change == 0 and len(lines) > 1:
            del lines[at]
        elif change == 1:
            lines.insert(to, lines[at])
        elif change == 2:
            lines[at], lines[to] = lines[to], lines[at]
        elif change == 3:
            lines[at] = lines[at][: draw.randint(0, len(lines[at]))]
        else:
            lines[at : at + 2] = ["".join(lines[at : at + 2])]
    return "\n".join(lines)


def word_changed(text: str, draw: random.Random) -> str:
    """One word of a line lost, doubled or replaced."""
    lines = text.split("\n")
    at = draw.randrange(len(lines))
    words = lines[at].split(" ")
    place = draw.randrange(len(words))
    words[place : place + 1] = draw.choice(([], [words[place]] * 2, [draw.choice(WORDS)]))
    lines[at] = " ".join(words)
    return "\n".join(lines)


def number_changed(text: str, draw: random.Random) -> str:
    """One run of digits replaced."""
    starts = [i for i, c in enumerate(text) if c.isdigit() and (i == 0 or not text[i - 1].isdigit())]
    if not starts:
        return text
    start = draw.choice(starts)
    end = start
    while end < len(text) and text[end].isdigit():
        end += 1
    return text[:start] + draw.choice((*WORDS[:6], str(draw.randint(0, 10**6)))) + text[end:]


def cut(text: str, draw: random.Random) -> str:
    """The end or the beginning lost."""
    at = draw.randrange(len(text) + 1)
    return draw.choice((text[:at], text[at:]))


def characters_changed(text: str, draw: random.Random) -> str:
    """A few characters replaced by any others."""
    found = list(text)
    for _ in range(draw.randint(1, 8)):
        found[draw.randrange(len(found))] = chr(draw.choice((draw.randrange(256), draw.randrange(0x3000))))
    return "".join(found)


CHANGES = (lines_changed, word_changed, number_changed, cut, characters_changed)


class TooSlow(Exception):
    """A mutant took more than `MOST_SECONDS`."""


def _stop(*_: object) -> None:
    raise TooSlow


def mutant_of(files: list[Path], seed: int, folder: Path) -> Path:
    """A damaged copy of one of the files."""
    draw = random.Random(seed)
    source = draw.choice(files)
    content = source.read_bytes()
    packed = content[:2] == b"\x1f\x8b"
    text = (gzip.decompress(content) if packed else content)[:MOST_BYTES].decode(errors="replace") or " "
    for _ in range(draw.randint(1, 3)):
        text = draw.choice(CHANGES)(text, draw) or " "
    mutant = folder / source.name
    data = text.encode(errors="replace")
    mutant.write_bytes(gzip.compress(data, 1) if packed else data)
    return mutant


def finite(value: object) -> bool:
    if isinstance(value, dict):
        return all(finite(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(finite(item) for item in value)
    return not isinstance(value, float) or math.isfinite(value)


def outcome(mutant: Path) -> str:
    """`reading` or `refusal`; raises whatever else happens."""
    try:
        reading = read_files([str(mutant)])
    except MmplanError as error:
        assert "\n" not in str(error), f"more than one line: {error}"
        return "refusal"
    yaml.safe_load(fragment_text(reading))
    assert finite(reading.fragment), "a number that is not finite"
    return "reading"


def fuzz(folder: Path, minutes: float, seed: int) -> dict[str, object]:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    counts: Counter[str] = Counter()
    slowest_s, until = 0.0, time.monotonic() + minutes * 60
    with tempfile.TemporaryDirectory() as scratch:
        while time.monotonic() < until:
            mutant, begun = mutant_of(files, seed, Path(scratch)), time.monotonic()
            signal.alarm(MOST_SECONDS)
            try:
                counts[outcome(mutant)] += 1
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                counts["crash"] += 1
                print(f"{folder.name}: seed {seed}, {mutant.name}: {traceback.format_exc(limit=-3)}", flush=True)
            finally:
                signal.alarm(0)
            slowest_s = max(slowest_s, time.monotonic() - begun)
            seed += 1
            mutant.unlink()
    row = {"files_of": folder.name, "files": len(files), "minutes": minutes, "mutants": sum(counts.values())}
    row |= {name: counts[name] for name in ("reading", "refusal", "crash")} | {"slowest_s": round(slowest_s, 2)}
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kind", nargs="*", help="folders; default: all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, _stop)
    folders = [path for path in sorted(options.folder.iterdir()) if path.is_dir()]
    chosen = [path for path in folders if not options.kind or path.name in options.kind]
    rows = {path.name: fuzz(path, options.minutes, options.seed) for path in chosen}
    kept = ROOT / "benchmarks" / ROWS
    if kept.is_file():
        with kept.open(newline="") as file:
            rows = {row["files_of"]: row for row in csv.DictReader(file)} | rows
    write_rows(ROWS, [rows[name] for name in sorted(rows)])


if __name__ == "__main__":
    main()
