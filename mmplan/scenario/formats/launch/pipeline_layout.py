"""Megatron-Core's `--pipeline-model-parallel-layout`: how many stages a text such as "Et*3|(tt|)*29,m|L" describes."""

import re

MAX_CHARACTERS = 20_000


def layout_stages(text: str) -> int | None:
    """Stages of a layout (parts between `|`, after `*n` is written out), None where it is no layout."""
    text = text.strip("\"'").replace(",", "").replace(" ", "")
    if not text or not re.fullmatch(r"[EtmL|()*0-9]+", text):
        return None
    while (group := re.search(r"(?:\(([^()]*)\)|([EtmL|]))\*(\d{1,4})", text)) is not None:
        part = group[1] if group[1] is not None else group[2]
        if len(part) * int(group[3]) + len(text) > MAX_CHARACTERS:
            return None
        text = text[: group.start()] + part * int(group[3]) + text[group.end() :]
    if not re.fullmatch(r"[EtmL|]+", text) or len(text) > MAX_CHARACTERS:
        return None
    return text.count("|") + 1
