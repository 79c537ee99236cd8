"""GPUs that people name in comments and file names: "preset for 64 H100 GPUs", "llama3_70b-8xb200.toml"."""

import re
from collections.abc import Iterable
from pathlib import Path

from mmplan.scenario.formats.launch.facts import Fact
from mmplan.scenario.formats.launch.shell_text import Word

_NAME = r"(?:GB[23]00|GH200|[BH][123]00|H20|H800|[AV]100|A800|A40|A10G?|L40S?|MI[23]\d{2}X?|(?:RTX[ -]?)?[34]090)"
_GPU = rf"{_NAME}(?:[ -]?(?:SXM\d?|PCIe|NVL))?(?:[ -]?\d{{2,3}}\s?GB?)?"
_COUNTED = re.compile(rf"\b(\d{{1,6}})\s*(?:x|\*|×)?\s*(?:NVIDIA[ -]|AMD[ -])?({_GPU})\b", re.IGNORECASE)
_NAMED = re.compile(rf"(?<![A-Za-z0-9])({_GPU})(?![A-Za-z0-9])", re.IGNORECASE)


_MEASURED = re.compile(
    r"(?<!\d)(\d{1,4})\s*(?:\*|x|×)\s*(\d{1,3}(?:\.\d{1,2})?)\s?Gi?B\b(?:[^\n]{0,40}?(\d{1,5}(?:\.\d{1,4})?)\s?s/it)?",
    re.IGNORECASE,
)


def measured_comment(comments: Iterable[Word], file: Path) -> tuple[dict[str, Fact], str]:
    """ms-swift's "# 2 * 72GiB; 4.1s/it" above a script: a hint at the number of GPUs, and a sentence; else nothing."""
    for word in comments:
        found = _MEASURED.search(word.text)
        if found is None or int(found[1]) < 1:
            continue
        step = f", {found[3]} s a step" if found[3] else ""
        sentence = f"line {word.line}: its author measured {found[2]} GiB on each of {found[1]} GPUs{step}"
        return {
            "hinted_world": Fact(value=int(found[1]), file=file, line=word.line or None, key="the comment")
        }, sentence
    return {}, ""


def hinted_devices(comments: Iterable[Word], file: Path) -> dict[str, Fact]:
    """`gpu`, and `hinted_world` where a count stands before it: of the first comment that names a GPU, else the file's
    name. No more than a hint: arguments come first."""
    named = [
        (Word(file.name.replace("_", " "), 0), "the file's name"),
        *((comment, "the comment") for comment in comments),
    ]
    for word, what in (*named[1:], named[0]):
        counted = _COUNTED.search(word.text)
        found = counted or _NAMED.search(word.text)
        if found is None:
            continue
        line = word.line or None
        facts = {"gpu": Fact(value=found[2] if counted else found[1], file=file, line=line, key=what)}
        if counted and int(counted[1]) > 0:
            facts["hinted_world"] = Fact(value=int(counted[1]), file=file, line=line, key=what)
        return facts
    return {}
