"""The model of a launched run: a config that stands beside it, a published name, or the dimensions that it writes."""

from pathlib import Path
from typing import Any

from mmplan.errors import InputError
from mmplan.planner.formats.launch_told import Told
from mmplan.scenario.formats.hf_config import bundled_configs, read_hf_config
from mmplan.scenario.formats.launch.facts import Fact, SetUp
from mmplan.scenario.formats.launch.known_models import known_model
from mmplan.scenario.formats.launch.vision_towers import tower_of
from mmplan.scenario.scenario import Model, ModelModule

VOCABULARY = 51_200  # GPT-2's 50,257 padded to a multiple of 128 x tp = 8 (arXiv 1909.08053, section 3)
MOST_WIDTH = 1_000_000
Kinds = dict[str, list[str]]
TARGETS = {
    "q": ("q_proj", "q", "linear_qkv", "query_key_value", "attn.qkv"),
    "k": ("k_proj", "k"),
    "v": ("v_proj", "v"),
    "o": ("o_proj", "o", "linear_proj"),
    "gate": ("gate_proj", "gate"),
    "up": ("up_proj", "up", "linear_fc1"),
    "down": ("down_proj", "down", "linear_fc2"),
}


def model_part(setup: SetUp, told: Told) -> tuple[dict[str, Any] | None, dict[str, Any], Kinds]:
    """(`model`, `train`) of the scenario and names of its modules by kind; without a model what is missing is told.

    Raises:
        InputError: dimensions that are needed and unreadable.
    """
    model = _model(setup, told)
    if model is None:
        flags = [
            f"{fact.place} {fact.value}" for name, fact in setup.facts.items() if name.startswith(("freeze_", "lora"))
        ]
        if flags:
            told.missing.append(f"train, once the model's modules are known: {', '.join(flags)}")
        return None, {}, {}
    kinds = _kinds(model)
    return model, _train(setup, kinds, model, told), kinds


def language_module(model: Model) -> ModelModule:
    """The first language model."""
    found = [module for module in model.modules if module.kind == "language_model"]
    if not found:
        raise InputError(f"{model.name} has no language model: such runs are not read")
    return found[0]


def _model(setup: SetUp, told: Told) -> dict[str, Any] | None:
    config = setup.facts.get("model_file")
    if config is not None:
        return {"hf_config": str(config.value)}
    name = setup.facts.get("model_name")
    if name is not None and "$" not in str(name.value):
        known = known_model(str(name.value))
        if known is not None:
            told.read.append(f"model {name.value}, from {name.place}: its published sizes")
            return _with_tower(known, setup, told) if "modules" in known else known
    missing = [key for key in ("layers", "hidden", "heads") if not setup.has(key)]
    if not missing:
        return _by_dimensions(setup, told)
    if len(missing) < 3:
        told.missing.append(f"model: the file says no {' and no '.join(missing)}")
    elif name is not None:
        told.missing.append(
            f"model: the sizes of '{name.value}' ({name.place}) are not known here; give its config.json too"
        )
    else:
        told.missing.append("model: no file says its sizes; give its config.json too")
    return None


def _by_dimensions(setup: SetUp, told: Told) -> dict[str, Any]:
    """Modules of the dimensions in the file, with a vision tower where one is named."""
    layers, hidden = setup.count("layers", most=2_000) or 1, setup.count("hidden", most=MOST_WIDTH) or 1
    heads = setup.count("heads", most=MOST_WIDTH) or 1
    gated = setup.flag("gated")
    ffn = setup.count("ffn", most=MOST_WIDTH) or (int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden) or 1
    llm: dict[str, Any] = {"kind": "language_model", "layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn}
    for key in ("kv_heads", "head_dim"):
        if (value := setup.count(key, most=MOST_WIDTH)) is not None:
            llm[key] = value
    if llm.get("head_dim") == hidden // heads:
        del llm["head_dim"]
    llm["vocabulary"] = setup.count("vocabulary", most=MOST_WIDTH) or VOCABULARY
    if not setup.has("vocabulary"):
        told.warnings.append(
            f"no file says the vocabulary: {VOCABULARY:,} tokens are assumed; change model.modules.llm.vocabulary"
        )
    if (multiple := setup.count("pad_vocabulary", most=MOST_WIDTH)) not in (None, 1):
        llm["pad_vocabulary"] = multiple
    if not gated:
        llm["gated_mlp"] = False
    if setup.text("norm") == "layer":
        llm["norm"] = "layer"
    if setup.flag("bias"):
        llm |= {"out_bias": True, "mlp_bias": True}
    for key, name in (("qkv_bias", "qkv_bias"), ("qk_norm", "qk_norm"), ("tied", "tied")):
        if setup.flag(name):
            llm[key] = True
    _add_experts(llm, setup, ffn)
    _add_latent(llm, setup)
    told.read.append(
        f"language model of {layers} layers, width {hidden:,}, {heads} heads, ffn {ffn:,}, from {_first(setup).place}"
    )
    return _with_tower({"modules": {"llm": llm}}, setup, told)


def _with_tower(model: dict[str, Any], setup: SetUp, told: Told) -> dict[str, Any]:
    """The language model behind the vision tower that the files name, if any."""
    llm = model["modules"]["llm"]
    tower = tower_of(setup, llm["hidden"])
    if tower is None:
        return model
    told.read.append(tower.sentence)
    told.warnings += tower.warnings
    modules = {"vision": tower.vision, "projector": tower.projector, "llm": llm}
    return {"modules": modules, "edges": [["vision", "projector"], ["projector", "llm"]]}


def _first(setup: SetUp) -> Fact:
    return setup.facts["layers"]


def _add_experts(llm: dict[str, Any], setup: SetUp, ffn: int) -> None:
    experts = setup.count("experts", most=MOST_WIDTH)
    if experts is None:
        return
    moe: dict[str, Any] = {
        "experts": experts,
        "topk": setup.count("topk", most=MOST_WIDTH) or 2,
        "expert_ffn": setup.count("expert_ffn", most=MOST_WIDTH) or ffn,
    }
    for key, name, least in (
        ("shared_ffn", "shared_ffn", 0),
        ("first_dense", "first_dense", 0),
        ("every", "moe_every", 1),
    ):
        if value := setup.count(name, most=MOST_WIDTH, least=least):
            moe[key] = value
    if (scoring := setup.text("scoring")) is not None:
        moe["scoring"] = scoring
    llm["moe"] = moe


def _add_latent(llm: dict[str, Any], setup: SetUp) -> None:
    if not setup.has("kv_lora"):
        return
    keys = ("q_lora", "kv_lora", "qk_nope", "qk_rope", "v_dim")
    llm["mla"] = {key: value for key in keys if (value := setup.count(key, most=MOST_WIDTH)) is not None}
    llm.pop("head_dim", None)
    llm.pop("kv_heads", None)


def _kinds(model: dict[str, Any]) -> Kinds:
    """Names of the model's modules by kind; of a language model that makes speech of another's states, `talker`."""
    kinds: Kinds = {}
    if "modules" in model:
        for name, module in model["modules"].items():
            kinds.setdefault(module["kind"], []).append(name)
        return kinds
    named = model["hf_config"]
    read = read_hf_config(bundled_configs().get(named, Path(named)))
    talkers = {edge.consumer for edge in read.edges if edge.kind == "hidden"}
    for each in read.modules:
        kinds.setdefault("talker" if each.name in talkers else each.kind, []).append(each.name)
    return kinds


def _train(setup: SetUp, kinds: Kinds, model: dict[str, Any], told: Told) -> dict[str, Any]:
    """What is frozen, and LoRA on the language model (and on encoders, where a file trains them so)."""
    train: dict[str, Any] = {}
    encoders = [name for kind, names in kinds.items() if kind.endswith("encoder") for name in names]
    for flag, names in (
        ("freeze_vision", encoders),
        ("freeze_projector", kinds.get("projector", [])),
        ("freeze_llm", kinds.get("language_model", [])),
    ):
        if setup.flag(flag):
            train |= dict.fromkeys(names, "frozen")
    train |= dict.fromkeys(kinds.get("talker", []), "frozen")  # trainers run the thinker alone
    lora = setup.text("lora")
    if lora is not None:
        rank = setup.count("lora_rank", most=8192) or 8
        targets = _targets(setup)
        for name in kinds.get("language_model", []):
            if train.get(name) != "frozen":
                train[name] = {"lora": {"rank": rank, "targets": _allowed(targets, model, name, told)}}
        if not setup.has("freeze_vision"):  # adapters on the language model alone leave the rest as it is
            train |= dict.fromkeys((*encoders, *kinds.get("projector", [])), "frozen")
    trained = [name for names in kinds.values() for name in names if train.get(name) != "frozen"]
    if not trained:
        told.warnings.append(
            "every module is frozen in the file: the projector is read as trained"
            if kinds.get("projector")
            else "every module is frozen in the file: all are read as trained"
        )
        train = {name: what for name, what in train.items() if name not in kinds.get("projector", [name])}
    return train


def _targets(setup: SetUp) -> list[str]:
    words = (setup.text("lora_targets") or "all").replace(",", " ").replace("[", " ").replace("]", " ").lower()
    if any(word.strip("\"'") in ("all", "all-linear", "all_linear", "default") for word in words.split()):
        return list(TARGETS)
    given = [word.strip("\"'*.") for word in words.split()]
    found = [target for target, spellings in TARGETS.items() if any(word.split(".")[-1] in spellings for word in given)]
    if any("qkv" in word for word in given):
        found = ["q", "k", "v", *(target for target in found if target not in "qkv")]
    if any("fc1" in word for word in given) and "gate" not in found:
        found.append("gate")
    return found or list(TARGETS)


def _allowed(targets: list[str], model: dict[str, Any], name: str, told: Told) -> list[str]:
    """Targets that a scenario accepts on this module; the others are told."""
    module = model.get("modules", {}).get(name, {})
    refused: set[str] = set()
    if module.get("mla"):
        refused |= {"q", "k", "v"}
    if module.get("moe"):
        refused |= {"gate", "up", "down"}
    if module.get("gated_mlp") is False:
        refused |= {"gate"}
    if left := [target for target in targets if target in refused]:
        told.warnings.append(
            f"adapters on {', '.join(left)} of '{name}' are not priced: its layers have experts or latent attention"
        )
    return [target for target in targets if target not in refused] or ["o"]
