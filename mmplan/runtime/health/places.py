"""Which modules and parameters belong to which modality."""

from collections.abc import Iterable, Mapping

from torch import nn

from mmplan.scenario.document import did_you_mean

SHARED = "shared"
# Parts of module names in models of transformers and in most others.
_WORDS = {
    "vision": ("vision", "visual", "image", "vit"),
    "audio": ("audio", "speech", "whisper"),
    "text": ("language", "text", "llm"),
}


def guessed_modalities(model: nn.Module) -> dict[str, str]:
    """For each modality the first of the outermost modules whose name says it is of that modality."""
    found: dict[str, str] = {}
    for name in sorted((name for name, _ in model.named_modules()), key=lambda name: name.count(".")):
        for modality, words in _WORDS.items():
            if any(word in name.rpartition(".")[2].lower() for word in words):
                found.setdefault(modality, name)
    return found


def modality_of(name: str, modalities: Mapping[str, str]) -> str:
    """The modality whose module holds this name; the innermost where several do, `shared` where none does."""
    found = [(len(path), modality) for modality, path in modalities.items() if f"{name}.".startswith(f"{path}.")]
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


def by_modality(names: Iterable[str], modalities: Mapping[str, str]) -> dict[str, list[str]]:
    """Names by modality, in their order; every modality is there, and `shared`."""
    found: dict[str, list[str]] = {modality: [] for modality in (*modalities, SHARED)}
    for name in names:
        found[modality_of(name, modalities)].append(name)
    return found
