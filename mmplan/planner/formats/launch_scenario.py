"""From what launch files say of a training run to a scenario with that run as its recipe, which `mmplan fit` prices.

What no file says and a price needs (the GPU, the number of nodes, images of a sample) is assumed and told as a warning.
A model that is only named and not known is left out and asked for.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from mmplan.errors import InputError
from mmplan.planner.formats.launch_data import MOST_SEQUENCE, fill_data
from mmplan.planner.formats.launch_model import model_part
from mmplan.planner.formats.launch_size import Size, size_of
from mmplan.planner.formats.launch_told import Told
from mmplan.planner.row_stack import device_in
from mmplan.scenario.catalogue import catalogue_device, device_names
from mmplan.scenario.formats.launch.deepspeed import STAGES
from mmplan.scenario.formats.launch.facts import Fact, SetUp
from mmplan.scenario.formats.launch.taken import like
from mmplan.scenario.formats.reading import Reading, device_told_once
from mmplan.scenario.stacks import technique_of

DEFAULT_DEVICE = "h100-sxm"
_DTYPES = ("bf16", "fp16", "fp32")


def launch_reading(setup: SetUp, machines: Sequence[Reading] = ()) -> Reading:
    """The scenario of a set-up, or the part of one that its files give.

    Args:
        machines: readings of files about the machines, whose fragment is a `cluster`.

    Raises:
        InputError: a value that is needed and set nowhere, or sizes that no scenario accepts.
    """
    told = Told(list(setup.read), list(setup.ignored), list(setup.warnings))
    setup = _as_named(setup, told)
    links = _machines(machines, told)
    for key, fact in (("nodes", "nodes"), ("devices_per_node", "per_node"), ("device", "gpu")):
        found, said = links.pop(key, None), setup.facts.get(fact)
        if fact == "gpu" and found is not None and said is not None and device_in(str(said.value)) == found:
            continue
        if found is not None and (said is None or fact == "gpu"):
            of_machines = Fact(value=found, file=setup.files[0], key="the machines' files")
            setup = replace(setup, facts={**setup.facts, fact: of_machines})
        elif found is not None and said is not None and str(said.value) != str(found):
            told.warnings.append(f"{said.place} = {said.value}, the machines' files say {found}: the first is taken")
    model, train, kinds = model_part(setup, told)
    if model is None:
        return _part(setup, links, told)
    size = size_of(setup, told)
    cluster = _cluster(setup, size, told) | links
    technique, own, summed = _plannable(_technique(setup))
    recipe = _recipe(setup, size) | ({"technique": own} if own else {})
    optimizer = {"name": "sgd"} if setup.text("optimizer") == "sgd" else {}
    optimizer |= {"gradient_dtype": summed} if summed != "fp32" else {}
    fragment: dict[str, Any] = {
        "name": _name(setup),
        "source": f"read from {', '.join(file.name for file in setup.files)}",
        "model": model,
        "train": train,
        "data": {},
        "batch": {"global": size.global_batch},
        "precision": _precision(setup, told),
        "optimizer": optimizer,
        "cluster": cluster,
        "technique": technique,
        "recipes": {"present": recipe},
    }
    fill_data(fragment, kinds, setup, told)
    fragment = {key: value for key, value in fragment.items() if value != {}}
    _told_recipe(size, told)
    _told_flushes(setup, size, told)
    return _reading(setup, fragment, "scenario", told)


_STAGE_IN_NAME = re.compile(r"(?:zero|z|stage|zero_stage|zero-stage)[_-]?([0-3])(?!\d)", re.IGNORECASE)


def _as_named(setup: SetUp, told: Told) -> SetUp:
    """With what the name of a file of settings says that is not given, unless another file says it."""
    named = setup.facts.get("second_file")
    if named is None or setup.has("sharding"):
        return setup
    name = str(named.value).replace("\\", "/").rsplit("/", 1)[-1]
    stage = _STAGE_IN_NAME.search(name)
    if stage is None:
        told.warnings.append(f"{name} is not given and its name says no ZeRO stage: that of the stack is assumed")
        return setup
    facts = dict(setup.facts) | {"sharding": like(named, STAGES[int(stage[1])])}
    if "offload" in name.lower() and "offload" not in facts:
        facts["offload"] = like(named, "parameters" if stage[1] == "3" else "optimizer")
    told.warnings.append(f"{name} is not given: by its name ZeRO stage {stage[1]} is assumed")
    return replace(setup, facts=facts)


def _machines(readings: Sequence[Reading], told: Told) -> dict[str, Any]:
    """The `cluster` that the readings give together; of several values the first, and unlike counts are told."""
    cluster: dict[str, Any] = {}
    for reading in readings:
        told.read += reading.read
        told.ignored += reading.ignored
        told.warnings += reading.warnings
        found = reading.fragment["cluster"]
        assert isinstance(found, dict)
        told.warnings += [
            f"{key}: {reading.kind} says {found[key]}, another file of the machines {cluster[key]}, which is taken"
            for key in ("device", "nodes", "devices_per_node")
            if key in found and key in cluster and found[key] != cluster[key]
        ]
        cluster = dict(found) | cluster
    return cluster


def machines_reading(readings: Sequence[Reading]) -> Reading:
    """Files about the machines alone, as one `cluster`.

    Raises:
        InputError: pools beside keys of other files, which may be of any of them.
    """
    told = Told()
    cluster = _machines(readings, told)
    if "pools" in cluster and len(readings) > 1:
        of_pools = next(reading.kind for reading in readings if "pools" in dict(reading.fragment["cluster"]))  # type: ignore[call-overload]
        raise InputError(
            f"{of_pools} gives pools of unlike nodes: import each file alone, and put its keys to its pool"
        )
    return Reading(
        kind=" and ".join(reading.kind for reading in readings),
        fragment={"cluster": cluster},
        read=tuple(told.read),
        ignored=tuple(told.ignored),
        warnings=device_told_once(told.warnings),
    )


def _part(setup: SetUp, links: dict[str, Any], told: Told) -> Reading:
    """What the files say, without anything assumed, and what a scenario needs besides."""
    size = size_of(setup, Told())  # raises where the numbers contradict each other
    counted = setup.has("world") or {"nodes", "per_node"} <= setup.facts.keys()
    replicas = next((setup.facts[name] for name in ("dp", "replicas") if setup.has(name)), None)
    whole = (counted or replicas is not None) and setup.has("microbatch")  # microbatch x accumulation x replicas
    recipe = {key: value for key, value in _recipe(setup, size).items() if key == "source" or setup.has(key)}
    cluster = dict(links)
    if setup.has("gpu") and (device := _device(setup, told)) is not None:
        cluster["device"] = device
    if replicas is not None and not counted:
        told.read.append(f"{size.dp} replicas = {size.devices} devices, from {replicas.place}")
        if not setup.has("per_node") and not setup.has("nodes"):
            told.warnings.append(f"no file says how many devices a node has: {size.per_node} are assumed")
    if setup.facts.keys() & {"nodes", "per_node", "world", "dp", "replicas"}:
        cluster |= {"nodes": size.nodes, "devices_per_node": size.per_node}
    fragment = {
        "data": {"text_tokens": setup.count("sequence", most=MOST_SEQUENCE)} if setup.has("sequence") else {},
        "batch": {"global": size.global_batch} if whole or setup.has("global_batch") else {},
        "precision": setup.text("precision"),
        "cluster": cluster,
        "technique": _technique(setup),
        "recipes": {"present": recipe} if len(recipe) > 1 else {},
    }
    needs = {"data": "the sequence length", "batch": "the global batch", "cluster": "GPU and number of nodes"}
    missing = [*told.missing, *(what for key, what in needs.items() if not fragment[key])]
    missing += ["the GPU"] if cluster and "device" not in cluster else []
    told.warnings.append(f"to make a scenario of it there are missing: {'; '.join(missing)}")
    return _reading(setup, {key: value for key, value in fragment.items() if value}, "part of a scenario", told)


def _reading(setup: SetUp, fragment: Mapping[str, Any], document: str, told: Told) -> Reading:
    plain = yaml.safe_load(
        yaml.safe_dump(dict(fragment), sort_keys=False)
    )  # no aliases: parts that are the same object
    return Reading(
        kind=setup.kind,
        fragment={key: plain[key] for key in fragment},
        document=document,
        read=tuple(told.read),
        ignored=tuple(told.ignored),
        warnings=device_told_once(told.warnings),
    )


def _name(setup: SetUp) -> str:
    stem = setup.text("name") or setup.files[0].name.split(".")[0]
    kept = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._+-") else "-" for letter in stem)
    return kept.strip("-._+")[:80] or "launch"


def _cluster(setup: SetUp, size: Size, told: Told) -> dict[str, Any]:
    return {
        "device": _device(setup, told) or DEFAULT_DEVICE,
        "nodes": size.nodes,
        "devices_per_node": size.per_node,
    }


def _device(setup: SetUp, told: Told) -> str | None:
    """The catalogue's device that the files speak of, if it can compute in their precision."""
    said = setup.facts.get("gpu")
    text = str(said.value) if said is not None else ""
    device = text if text in device_names() else device_in(text)
    if said is None or device is None:
        told.warnings.append(
            f"no file says which GPU: {DEFAULT_DEVICE} is assumed; change cluster.device, or `mmplan fit --gpu NAME`"
        )
        return None
    precision = setup.text("precision")
    if precision in _DTYPES and catalogue_device(device).device.flops_per_s(precision) is None:
        told.warnings.append(f"{device} ({said.place}) has no {precision} units: {DEFAULT_DEVICE} is assumed")
        return None
    told.read.append(f"GPU {device}, from {said.place}")
    alike = [name for name in device_names() if name.split("-")[0] == device.split("-")[0]]
    if len(alike) > 1 and text not in alike and not _VARIANT.search(text):
        of_these = f"{said.place} = {text} does not say which of {', '.join(sorted(alike))}"
        told.warnings.append(f"{of_these} it is: {device} is taken")
    return device


_VARIANT = re.compile(r"(?i)sxm|pcie|nvl|hbm|(?<!\d)(?:16|32|40|64|80|94)\s?gi?b?(?![a-z0-9])")


def _precision(setup: SetUp, told: Told) -> str:
    word = setup.text("precision")
    if word in _DTYPES:
        return word
    told.warnings.append("no file says the precision: bf16 is assumed")
    return "bf16"


_TECHNIQUES = (
    "attention", "fp8", "context_parallel", "offload", "gradient_dtype", "cross_entropy", "recompute", "sharding",
)  # fmt: skip


def _technique(setup: SetUp) -> dict[str, Any]:
    """What the files say of the software, and its stack."""
    stack = setup.text("stack") or "torch-2025"
    technique: dict[str, Any] = {"stack": stack}
    technique |= {key: setup.text(key) for key in _TECHNIQUES if setup.has(key)}
    if technique.get("recompute") == "full" and (layers := setup.count("recompute_layers")) is not None:
        technique["recompute_layers"] = layers
    megatron = stack.startswith(("nemo", "megatron"))
    for key in ("sequence_parallel", "overlap_dp", "dropout"):
        if setup.has(key) or (key == "sequence_parallel" and megatron):
            technique[key] = setup.flag(key)
    if "gradient_dtype" not in technique and setup.text("precision") in (None, "bf16") and megatron:
        technique["gradient_dtype"] = "fp32"  # Megatron sums bf16 gradients in fp32 (arguments.py, bf16)
    return technique


def _plannable(technique: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
    """(what plans and runs price, what only the present run does, type that gradients are summed in).

    Plans do not price overlapped reductions and recomputation of some layers (planner/plan_technique.py); host memory
    is the present run's own. What the recipe says of sharding and recomputation binds it alone, too: a search is free
    to do less.
    """
    whole = technique_of(**technique)
    own: dict[str, Any] = {}
    technique |= {key: "none" for key in ("sharding", "recompute") if key in technique}
    if whole.overlap_dp:
        own["overlap_dp"], technique["overlap_dp"] = True, False
    if whole.offload != "none":
        own["offload"], technique["offload"] = whole.offload, "none"
    if technique.pop("recompute_layers", None) is not None:
        own["recompute_layers"] = whole.recompute_layers
    return technique, own, whole.gradient_dtype or "fp32"


def _recipe(setup: SetUp, size: Size) -> dict[str, Any]:
    missing = setup.facts.get("second_file")
    lacks = f"; without {missing.value}, which was not given" if missing is not None else ""
    recipe: dict[str, Any] = {"source": f"{', '.join(file.name for file in setup.files)}{lacks}"[:300]}
    for key, value, default in (
        ("tp", size.tp, 1),
        ("pp", size.pp, 1),
        ("cp", size.cp, 1),
        ("ep", size.ep, 1),
        ("etp", size.etp, None),
        ("vp", size.vp, 1),
        ("microbatch", size.microbatch, 0),
    ):
        if value != default:
            recipe[key] = value
    for key in ("sharding", "recompute"):
        if (word := setup.text(key)) is not None:
            recipe[key] = word
    return recipe


def _told_flushes(setup: SetUp, size: Size, told: Told) -> None:
    """A pipeline that is emptied several times a step is priced as one that is emptied once."""
    each = setup.count("flush", most=10_000_000)
    if each is None or size.pp == 1 or size.microbatches <= each:
        return
    flushes = -(-size.microbatches // each)
    bubble, priced = ((size.pp - 1) / (count + size.pp - 1) for count in (each, size.microbatches))
    told.warnings.append(
        f"{setup.facts['flush'].place} empties the pipeline after {each} of {size.microbatches} microbatches, "
        f"{flushes} times a step: its bubble is about {bubble:.0%}; priced is one pipeline of {size.microbatches}, "
        f"{priced:.0%}"
    )


def _told_recipe(size: Size, told: Told) -> None:
    told.read.append(
        f"tp {size.tp} x cp {size.cp} x pp {size.pp} x dp {size.dp} = {size.devices} devices"
        + (f", ep {size.ep}" if size.ep > 1 else "")
        + (f", {size.vp} chunks per rank" if size.vp > 1 else "")
        + f"; global batch {size.global_batch} = {size.microbatches} x {size.microbatch} x dp {size.dp}"
    )
