"""Families that are known and not read, each with what stands in the way."""

from collections.abc import Mapping

_SEES = "it finds, outlines or measures things in images and has no language model to train"
_PAGES = "it reads the layout or the lines of pages by convolutions and has no language model to train"
_CODEC = "it turns sound into codes and back, without a language model"
_SPEAKS = "its network between text and sound has no blocks of a transformer that a reader here knows"
_PROTEIN = "it reads proteins"

REFUSED: Mapping[str, str] = {
    "blt": "a second model cuts its bytes into patches of unlike lengths, so its rows follow from no size of a sample",
    "deepseek_v4": "its keys are compressed over windows before an index chooses among them, which has no reader here",
    "diffusion_gemma": "its decoder denoises blocks of text that its encoder reads with the same weights, and a layer "
    "here runs once",
    "inkling2_loop": "its middle layers run several times on the same weights, and a layer here runs once",
    **dict.fromkeys(
        (
            *("chmv2", "conditional_detr", "d_fine", "dab-detr", "deformable_detr", "deimv2", "depth_anything"),
            *("depth_pro", "detr", "dpt", "lightglue", "lw_detr", "mask2former", "maskformer", "oneformer"),
            *("prompt_depth_anything", "rf_detr", "rt_detr", "rt_detr_v2", "sapiens2", "superglue"),
            *("table-transformer", "tipsv2_dpt", "upernet", "vitmatte", "vitpose", "zoedepth"),
        ),
        _SEES,
    ),
    **dict.fromkeys(
        ("layoutlmv2", "layoutxlm"), "its tower is a ResNeXt of detectron2, which transformers does not hold"
    ),
    **dict.fromkeys(
        (
            *("pp_doclayout_v2", "pp_doclayout_v3", "pp_doclayout_v4", "pp_formulanet", "pp_ocrv5_mobile_det"),
            *("pp_ocrv5_mobile_rec", "pp_ocrv5_server_det", "pp_ocrv5_server_rec", "pp_ocrv6_medium_det"),
            *("pp_ocrv6_small_det", "pp_ocrv6_small_rec", "pp_ocrv6_tiny_rec", "slanet", "slanext", "uvdoc"),
        ),
        _PAGES,
    ),
    **dict.fromkeys(("higgs_audio_v2_tokenizer", "neucodec", "xcodec", "xcodec2", "qwen2_5_omni_token2wav"), _CODEC),
    **dict.fromkeys(("fastspeech2_conformer_with_hifigan", "gradium_phonon_tts", "pocket_tts"), _SPEAKS),
    **dict.fromkeys(("esm", "esmfold2", "evolla", "EvollaModel"), _PROTEIN),
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "it drafts words from the keys and values of another model: give that model's config",
    ),
    **dict.fromkeys(
        ("deepseek_ocr2_vision", "unlimited_ocr_vision", "t5gemma2_encoder"),
        "it is a part of a model: give the config of the whole one",
    ),
    "omdet-turbo": "its neck mixes three resolutions at once (CSP blocks), and a module here reads one",
    "kimi_k3": "its modelling code is no part of transformers 5.24 (attention residuals, experts in a latent width), "
    "so nothing confirms its parameters",
    "mllama_text_model": "its cross layers attend to the tokens of a tower: give the whole model's config (mllama)",
}


def refusal(kind: str) -> str | None:
    """Why a `model_type` is not read, or None where nothing is known against it."""
    return REFUSED.get(kind)
