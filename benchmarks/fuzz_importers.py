"""How importers stand damage: real files with lines, columns, numbers and bytes lost, doubled, moved or replaced.

    python benchmarks/fuzz_importers.py FOLDER [--minutes 10] [--kind nccl ...] [--seed 0]

FOLDER holds one folder per kind of files, which are cut into small pieces (`fuzz_seeds.py`). Every mutant must give a
reading whose values are finite and can be written as YAML, or one sentence of refusal; anything else (an exception,
more than 20 seconds of the processor) is printed with the number of the mutant and counted as a crash. Beside each
mutant a second file is read that differs from it in a way with a known effect (`fuzz_relations.py`): a reading that
breaks the relation is wrong without a word, and counted so. The minutes are those of the processor, whatever works
beside it. Rewrites the rows of these folders in benchmarks/fuzz_importers.csv.
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
from fuzz_relations import RELATIONS
from fuzz_seeds import Seed, seeds_of
from measured import ROOT, write_rows

from mmplan.commands.import_kinds import read_files
from mmplan.errors import MmplanError
from mmplan.report.formats import fragment_text
from mmplan.scenario.formats.reading import Reading

ROWS = "fuzz_importers.csv"
MOST_SECONDS = 20  # of the processor
UNHARMED = 8  # one in so many files is not damaged
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


def damaged(seed: Seed, draw: random.Random) -> bytes:
    """The seed with one to three changes."""
    text = seed.text
    if text is None:
        content = bytearray(seed.content)
        for _ in range(draw.randint(1, 8)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        return bytes(content[: draw.choice((None, draw.randrange(len(content) + 1)))])
    for _ in range(draw.randint(1, 3)):
        text = draw.choice(CHANGES)(text, draw) or " "
    return text.encode(errors="replace")


def finite(value: object) -> bool:
    if isinstance(value, dict):
        return all(finite(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(finite(item) for item in value)
    return not isinstance(value, float) or math.isfinite(value)


def outcome(path: Path, content: bytes, kind: str | None = None) -> Reading | None:
    """The reading of a file with this content, None where it is refused; raises whatever else happens."""
    path.write_bytes(content)
    try:
        reading = read_files([*([kind] if kind is not None else []), str(path)])
    except MmplanError as error:
        assert "\n" not in str(error), f"more than one line: {error}"
        return None
    finally:
        path.unlink()
    yaml.load(fragment_text(reading), yaml.CSafeLoader)
    assert finite(reading.fragment), "a number that is not finite"
    return reading


def tried(seeds: list[Seed], kind: str, number: int, folder: Path, counts: Counter[str]) -> None:
    """One mutant, and the file beside it."""
    draw = random.Random(number)
    seed = draw.choice(seeds)
    unharmed = draw.randrange(UNHARMED) == 0
    content = seed.content if unharmed else damaged(seed, draw)
    path = folder / seed.name
    before = outcome(path, gzip.compress(content, 1) if seed.packed else content)
    counts["refusal" if before is None else "reading"] += 1
    relations = [relation for relation in RELATIONS[kind] if unharmed or relation.of_mutants]
    if seed.text is None or not relations:
        return
    relation = draw.choice(relations)
    other = relation.change(content.decode(errors="replace"), draw)
    if other is None:
        return
    counts["compared"] += 1
    # named, for a kind is guessed by the first 64 KB, and what shows it may have moved
    wrong = relation.expect(before, outcome(path, other, before.kind if before is not None else None))
    if wrong is not None:
        counts["wrong"] += 1
        print(f"{kind}: number {number}, {seed.name}: {relation.name}: {wrong}", flush=True)


def fuzz(folder: Path, minutes: float, number: int) -> dict[str, object]:
    seeds = seeds_of(folder)
    counts: Counter[str] = Counter()
    slowest_s, start, started = 0.0, time.monotonic(), time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        while time.process_time() < started + minutes * 60:
            begun = time.monotonic()
            signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
            try:
                tried(seeds, folder.name, number, Path(scratch), counts)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                counts["crash"] += 1
                print(f"{folder.name}: number {number}: {traceback.format_exc(limit=-3)}", flush=True)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            slowest_s = max(slowest_s, time.monotonic() - begun)
            number += 1
    row = {"files_of": folder.name, "files": len({seed.name for seed in seeds}), "pieces": len(seeds)}
    row |= {"minutes": round((time.monotonic() - start) / 60, 2)}
    row |= {"of_processor": round((time.process_time() - started) / 60, 2)}
    row |= {"mutants": counts["reading"] + counts["refusal"]}
    row |= {name: counts[name] for name in ("reading", "refusal", "crash", "compared", "wrong")}
    row |= {"slowest_s": round(slowest_s, 2), "note": ""}
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kind", nargs="*", help="folders; default: all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGPROF, _stop)
    folders = [path for path in sorted(options.folder.iterdir()) if path.is_dir()]
    chosen = [path for path in folders if not options.kind or path.name in options.kind]
    kept = ROOT / "benchmarks" / ROWS
    rows: dict[str, dict[str, object]] = {}
    if kept.is_file():
        with kept.open(newline="") as file:
            rows = {row["files_of"]: dict(row) for row in csv.DictReader(file)}
    for path in chosen:
        rows[path.name] = fuzz(path, options.minutes, options.seed)
        write_rows(ROWS, [rows[name] for name in sorted(rows)])


if __name__ == "__main__":
    main()
