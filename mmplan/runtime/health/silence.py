"""Which monitors `attach` cannot have take a reading, and why: a monitor that is silent is no sign of health."""

from mmplan.runtime.health.settings import Settings


def silence(settings: Settings, *, averaging: bool) -> dict[str, str]:
    """Monitor -> why it takes no reading; `averaging`: gradients are means over ranks that no group names."""
    found = {"feature_jitter": "only runs of `mmplan execute` tell the times of their stages"}
    named = len(settings.embeddings)
    if settings.compiled:
        found["headroom"] = "the model is compiled, and hooks that come and go would compile it anew"
    if named < 2:
        told = "`embeddings` names no module" if named == 0 else "`embeddings` names one modality only"
        found |= {"jed": told, "cmrc": told}
    if named == 0:
        found |= dict.fromkeys(("drift", "robustness"), "`embeddings` names no module")
    elif settings.groups.stages is not None:
        found["robustness"] = "no stage of a pipeline has the whole way from an image to the text output"
    if not settings.cross_attention:
        found["attention_collapse"] = "`cross_attention` names no module"
        if len(settings.branches) < 2:
            found["gradient_attenuation"] = "fewer than two modalities are known, and no cross-attention"
    if not settings.keys:
        found["kv_shift"] = "`keys` names no module"
    if averaging:
        found["gradient_variance"] = "gradients are means over ranks that `groups` does not name"
    elif not settings.watches_variance:
        found["gradient_variance"] = "nobody says which parameters several ranks of `shards` hold"
    return found
