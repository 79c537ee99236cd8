"""Fun-ASR-Nano: seven spectrogram frames in a row, blocks of attention beside a depthwise convolution over values, a
small encoder, Qwen 3. The first block reads wider rows; its attention's products are not counted."""

from dataclasses import replace

from mmplan.scenario.formats.hf.ears import audio_module
from mmplan.scenario.formats.hf.resamplers import encoder_module
from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf.vit import vit
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import chain
from mmplan.scenario.scenario import AudioInput, Model, ModelModule
from mmplan.scenario.steps import Active, Attend, Convolve, Dense, Fork, Form, Kept, Mlp, Normed, Steps, residual

SHIFT = 6  # frames from one row to the next (preprocessor_config.json of FunAudioLLM/Fun-ASR-Nano)


def nano(config: Fields, name: str) -> Model:
    audio, llm = ear(config.part("audio_config")), text_module(config, "text_config")
    fields = config.part("adaptor_config", kind="fun_asr_nano_adaptor")
    width, inner = fields.count("hidden_size"), fields.count("projector_hidden_size")
    shape = vit(fields, final_norm=False)
    form = Form(front=(Dense(width=inner), Active(), Dense(width=width)))
    return chain(name, audio, encoder_module(shape, form, name="audio_adaptor", modality="audio"), llm)


def ear(fields: Fields) -> ModelModule:
    shape = vit(fields, final_norm=False)
    width, taps, ffn = shape.hidden, fields.count("fsmn_kernel_size", most=10_000), shape.ffn
    bins, stacked = fields.count("num_mel_bins"), fields.count("num_stacked_frames", most=1_000)
    over = Convolve(width=width, taps=taps, groups=width, bias=False)
    raw = bins * stacked
    mlp = residual(Normed(), Dense(width=ffn), Active(), Dense(width=width))
    front: Steps = (Normed(), Dense(width=width), Kept(size=2 * (raw + 1) * width), over, Dense(width=width), mlp)
    block: Steps = (residual(Normed(), Fork(left=(Attend(),), right=(over,))), residual(Normed(), Mlp()))
    shape = replace(shape, layers=shape.layers - 1)
    audio = AudioInput(mel_bins=bins, pad_s=None, stride=SHIFT)
    module = audio_module(shape, audio, 4 * width)  # norms behind two of the blocks
    return replace(module, form=Form(front=front, raw_width=raw, blocks=((shape.layers, block),)))
