"""The numerics of a multimodal training loop: loss scales, gradient clipping, norms and losses that stay exact when
modalities differ and work is split over ranks.

Nothing here needs a plan: every part works on modules, parameters and process groups of any PyTorch loop, and on one
process where torch.distributed is not initialised. One convention holds throughout: the loss of a training step is the
*sum* over ranks of what each rank calls `backward` on. `docs/numerics.md` shows each part in a few lines.
"""
