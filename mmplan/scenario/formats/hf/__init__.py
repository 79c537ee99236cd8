"""Hugging Face's config.json as a `Model`. Where to look:

- `families.py` names the reader of each `model_type`, `encoders_alone.py` those without a language model, `refused.py`
  what is known and not read. A reader is a function of `Fields` (`../hf_fields.py`) and a name.
- Parts that many share: `stacks.py` (language models, with `experts.py`, `mixers.py`, `mamba.py`, `gemma.py`,
  `minimax.py`, `muse_blocks.py`, `sparse_index.py`), `towers.py` and `native_towers.py` (eyes, made of `vit.py`),
  `convnets.py`, `swin.py`, `sam.py`, `timm_towers.py` (eyes of several resolutions), `ears.py`, `conformers.py`,
  `codecs.py` (ears), `resamplers.py` (queries), `decoders.py` (blocks that attend to an encoder).
- The other files are families that have something in common, each told in its first line.
- Absent keys: `class_defaults.py`, from the classes by `benchmarks/hf_class_defaults.py`.

A new family is a function that puts parts together, a line in `families.py` and one in
`tests/scenario/test_hf_multimodal.py`; `python benchmarks/hf_models.py --only KIND --mutate` compares it with
transformers, key by key.
"""
