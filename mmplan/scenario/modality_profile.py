"""Live profiles per modality: what a training run sees of each encoder and language model, as a file.

    schema: mmplan.modalities/1
    modalities:
      vision: {forward: 187.3 ms, parameters: 1240 MB}
      text: {forward: 53.6 ms, parameters: 3210 MB}

`forward`: seconds in which the ranks of a plan run the layers of a modality forward for one mean microbatch of the
plan, stage after stage: all modules of the modality, projectors included, or one module where its name is no modality.
`parameters`: the weights of these, to see that model and profile belong together; need not be given.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from mmplan.errors import InputError
from mmplan.scenario.document import Document, did_you_mean, listed, read_document, shown
from mmplan.scenario.scenario import Model
from mmplan.scenario.schema_base import Strict
from mmplan.scenario.schema_values import Bytes, Seconds

SCHEMA = "mmplan.modalities/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModalityProfile:
    """One entry: the modules that it speaks of."""

    name: str
    modules: tuple[str, ...]
    forward_s: float
    parameter_bytes: int | None


class EntrySpec(Strict):
    forward: Seconds
    parameters: Bytes | None = None


class ModalitiesSpec(Strict):
    schema_: Literal["mmplan.modalities/1"] = Field(alias="schema")
    source: str = ""
    modalities: dict[str, EntrySpec] = Field(min_length=1)


def read_modality_profiles(path: Path, model: Model) -> tuple[ModalityProfile, ...]:
    """The entries of a file of live profiles.

    Raises:
        InputError: one sentence with file, line and key: not such a file, a modality or module that the model does not
            have, a module that is named twice, no time.
    """
    document = read_document(path)
    try:
        spec = ModalitiesSpec.model_validate(document.values)
    except ValidationError as error:
        raise first_finding(document, error) from None
    found: list[ModalityProfile] = []
    for name, entry in spec.modalities.items():
        modules = _modules(name, model, document)
        for other in found:
            twice = set(modules) & set(other.modules)
            if twice:
                message = f"{listed(sorted(twice))} is profiled here and by {shown(other.name)}"
                raise document.error(("modalities", name), message)
        if entry.forward == 0:
            raise document.error(("modalities", name, "forward"), "expected a time above 0, found 0")
        found.append(
            ModalityProfile(name=name, modules=modules, forward_s=entry.forward, parameter_bytes=entry.parameters)
        )
    return tuple(found)


def _modules(name: str, model: Model, document: Document) -> tuple[str, ...]:
    names = [module.name for module in model.modules]
    modules = tuple(module.name for module in model.modules if module.modality == name)
    if not modules and name in names:
        return (name,)
    if not modules:
        known = list(dict.fromkeys([*(module.modality for module in model.modules), *names]))
        hint = did_you_mean(name, known) or f"; known: {listed(known)}"
        raise document.error(("modalities", name), f"the model has no modality or module {shown(name)}{hint}")
    return modules


def first_finding(document: Document, error: ValidationError) -> InputError:
    """The first finding of pydantic as one sentence."""
    first = error.errors(include_url=False)[0]
    path = tuple(first["loc"])
    context = first.get("ctx", {})
    if first["type"] == "unknown_key":
        return document.error((*path, context["key"]), f"unknown key{context['hint']}")
    if first["type"] == "missing":
        return document.error(path, "this key is missing")
    if first["type"] == "sentence":
        return document.error(path, str(context["sentence"]))
    message = first["msg"]
    return document.error(path, f"{message[:1].lower()}{message[1:]}, found {shown(first['input'])}")
