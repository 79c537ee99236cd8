"""Which modules and parameters belong to which modality."""

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from mmplan.scenario.document import did_you_mean

SHARED = "shared"
# Parts of module names in models of transformers and in most others.
_WORDS = {
    "vision": ("vision", "visual", "image", "vit"),
    "audio": ("audio", "speech", "whisper"),
    "text": ("language", "text", "llm"),
}
_ENDS = {
    "text": ("embed_tokens", "tok_embeddings", "wte"),
    "other": ("projector", "projection", "connector", "merger", "resampler", "perceiver"),
}


def guessed_modalities(model: nn.Module) -> dict[str, str]:
    """For each modality the first of the outermost modules whose name says it is of that modality."""
    found: dict[str, str] = {}
    for name in sorted((name for name, _ in model.named_modules()), key=lambda name: name.count(".")):
        for modality, words in _WORDS.items():
            if any(word in name.rpartition(".")[2].lower() for word in words):
                found.setdefault(modality, name)
    return found


def guessed_branches(model: nn.Module, modalities: Mapping[str, str]) -> dict[str, str]:
    """Of each modality the outermost module whose name says that its output goes to the fusion: a projector, the table
    of tokens; the modality's own module where there is none."""
    names = sorted((name for name, _ in model.named_modules()), key=lambda name: name.count("."))
    branches = dict(modalities)
    for modality in modalities:
        words = _ENDS["text"] if modality == "text" else _ENDS["other"]
        ends = [name for name in names if any(word in name.rpartition(".")[2].lower() for word in words)]
        if modality != "text" and len(modalities) > 2:  # with several encoders a projector has to name its own
            ends = [name for name in ends if any(word in name.lower() for word in _WORDS[modality])]
        branches[modality] = next(iter(ends), modalities[modality])
    return branches


Places = Sequence[tuple[str, str]]  # modality and path of a module


def modality_of(name: str, places: Places) -> str:
    """The modality whose module holds this name; the innermost where several do, `shared` where none does."""
    found = [(len(path), modality) for modality, path in places if f"{name}.".startswith(f"{path}.")]
    return max(found)[1] if found else SHARED


def module_at(model: nn.Module, path: str, *, optional: bool = False) -> nn.Module | None:
    """The module of that name.

    Args:
        optional: another pipeline rank may have it.

    Raises:
        ValueError: there is none.
    """
    names = dict(model.named_modules())
    if path in names:
        found: nn.Module = names[path]
        return found
    if optional:
        return None
    raise ValueError(f"the model has no module '{path}'{did_you_mean(path, names)}")


def by_modality(names: Iterable[str], places: Places) -> dict[str, list[str]]:
    """Names by modality, in their order; every modality is there, and `shared`."""
    found: dict[str, list[str]] = {modality: [] for modality in (*(modality for modality, _ in places), SHARED)}
    for name in names:
        found[modality_of(name, places)].append(name)
    return found
