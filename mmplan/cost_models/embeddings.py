"""The operators of the first and last layers of a module: patches, audio frames, tokens, head and loss."""

from dataclasses import replace

from mmplan.cost_models.blocks import linear_ops
from mmplan.cost_models.ops import (
    Activation,
    ClassToken,
    Conv1d,
    Conv2d,
    CrossEntropy,
    DropClassToken,
    Embedding,
    Interleave,
    Linear,
    Norm,
    Op,
    Pool,
    Positions,
    Stored,
)
from mmplan.cost_models.values import CONTEXT, TOKENS, Rows, Value
from mmplan.scenario.scenario import AudioInput, ModelModule, TextInput, Training, Transformer, VisionInput, Vocabulary


def image_patches(vision: VisionInput) -> int | None:
    """Patches of one image (or tile) of fixed size, None at native resolution."""
    return None if vision.image_size is None else (vision.image_size // vision.patch) ** 2


def patch_embed_ops(vision: VisionInput, shape: Transformer, training: Training) -> tuple[Op, ...]:
    """raw [patches, channels * temporal_patch * patch^2] -> [tokens, hidden].

    The patch convolution has stride = kernel, so it is a linear over unfolded patches.
    """
    trained, patches = training.mode == "full", image_patches(vision)
    raw_width = vision.channels * vision.temporal_patch * vision.patch**2
    raw = Value("raw", Rows("input_elements", per=raw_width), raw_width)
    value = Value("patches", raw.rows, shape.hidden)
    ops: list[Op] = [Linear(name="patch", x=raw, y=value, bias=vision.patch_bias, trainable=trained)]
    if vision.class_token:
        tokens = Value("tokens", TOKENS, shape.hidden)
        ops.append(ClassToken(name="class_token", x=value, y=tokens, period=patches, trainable=trained))
        value = tokens
    if vision.position_rows:
        placed = Value("placed", TOKENS, shape.hidden)
        size = vision.position_rows
        ops.append(Positions(name="positions", x=value, y=placed, size=size, trainable=trained, stretched=True))
        value = placed
    if vision.learned_positions:
        if patches is None:
            raise ValueError("learned positions need a fixed image_size")
        placed = Value("placed", TOKENS, shape.hidden)
        size = patches + (1 if vision.class_token else 0)
        ops.append(Positions(name="positions", x=value, y=placed, size=size, trainable=trained))
        value = placed
    if shape.norm_first_extra:
        normed = Value("normed", TOKENS, shape.hidden)
        ops.append(Norm(name="pre_norm", x=value, y=normed, kind=shape.norm, trainable=trained, bias=shape.norm_bias))
    return tuple(ops)


def audio_embed_ops(audio: AudioInput, shape: Transformer, training: Training) -> tuple[Op, ...]:
    """raw [frames, mel_bins] -> [tokens, hidden]: Whisper's two convolutions with GELU, then positions.

    Whisper's position table is stored but not trained (openai/whisper, `AudioEncoder.positional_embedding`).
    """
    if audio.channels:
        return _chunked_audio_ops(audio, shape, training)
    trained = training.mode == "full"
    raw = Value("raw", Rows("input_elements", per=audio.mel_bins), audio.mel_bins)
    conv1, active1 = (Value(name, raw.rows, shape.hidden) for name in ("conv1", "active1"))
    conv2, active2, placed = (Value(name, TOKENS, shape.hidden) for name in ("conv2", "active2", "placed"))
    return (
        Conv1d(name="conv1", x=raw, y=conv1, kernel=3, stride=1, trainable=trained),
        Activation(kind="gelu", x=conv1, y=active1),
        Conv1d(name="conv2", x=active1, y=conv2, kernel=3, stride=2, trainable=trained),
        Activation(kind="gelu", x=conv2, y=active2),
        Positions(name="positions", x=active2, y=placed, size=audio.positions, trainable=False),
    )


def _chunked_audio_ops(audio: AudioInput, shape: Transformer, training: Training) -> tuple[Op, ...]:
    """raw [frames, mel_bins] -> [tokens, hidden]: convolutions over frames and bins of each chunk, one linear."""
    trained, ops = training.mode == "full", list[Op]()
    frames, bins, inputs = audio.chunk_frames, audio.mel_bins, 1
    value = Value("raw", Rows("input_elements", per=audio.mel_bins), audio.mel_bins)
    for index, outputs in enumerate(audio.channels):
        left, bins = -(-frames // 2), -(-bins // 2)
        rows = Rows("input_elements", times=left, per=audio.mel_bins * audio.chunk_frames)
        conv, active = (Value(f"{name}{index}", rows, outputs * bins) for name in ("conv", "active"))
        ops.append(
            Conv2d(name=conv.name, x=value, y=conv, inputs=inputs, outputs=outputs, frames=frames, trainable=trained)
        )
        ops.append(Activation(kind="gelu", x=conv, y=active))
        value, frames, inputs = active, left, outputs
    tokens, placed = Value("tokens", TOKENS, shape.hidden), Value("placed", TOKENS, shape.hidden)
    ops.append(Linear(name="conv_out", x=value, y=tokens, bias=False, trainable=trained))
    ops.append(Positions(name="positions", x=tokens, y=placed, size=audio.positions, trainable=False))
    return tuple(ops)


def token_embed_ops(
    vocabulary: Vocabulary,
    hidden: int,
    training: Training,
    merged: tuple[str, ...],
    hidden_source: tuple[str, int] | None,
) -> tuple[Op, ...]:
    """Token table, and the tokens of other modules placed into the sequence: ids -> [tokens, hidden].

    merged: modules whose tokens enter as they are; hidden_source: (module, width) of a language model whose last
    hidden states enter through a linear with bias, which with `vocabulary.width` token embeddings pass too.
    """
    trained = training.mode == "full"
    width = vocabulary.width or hidden
    text = Value("text", Rows("input_elements"), width)
    size, unit, elsewhere = vocabulary.size, vocabulary.pad_to, vocabulary.elsewhere
    table = Embedding(name="table", y=text, size=size, trainable=trained, unit=unit, tied=elsewhere)
    ops: list[Op] = [table]
    parts, keys = [text, *(Value(name, TOKENS, hidden) for name in merged)], ["text", *merged]
    project_all = hidden_source is not None and vocabulary.width is not None
    if hidden_source is not None:
        keys.append(hidden_source[0])
        states = Value(hidden_source[0], CONTEXT, hidden_source[1])
        if project_all:
            parts.append(states)
        else:
            projected = Value(f"{hidden_source[0]}.projected", CONTEXT, hidden)
            ops += linear_ops("from_hidden", states, projected, training, bias=True)
            parts.append(projected)
    if len(parts) == 1:
        return tuple(ops)
    sequence = Value("sequence", TOKENS, width)
    ops.append(Interleave(parts=tuple(parts), keys=tuple(keys), y=sequence))
    if project_all:
        ops += linear_ops("from_hidden", sequence, Value("embedded", TOKENS, hidden), training, bias=True)
    return tuple(ops)


def text_position_ops(text: TextInput, hidden: int, training: Training, x: Value) -> tuple[Op, ...]:
    """A stored position added to each token of a text encoder (CLIP)."""
    if text.tokens is None:
        raise ValueError("learned positions need a fixed number of tokens")
    placed = Value("placed", x.rows, hidden)
    return (Positions(name="positions", x=x, y=placed, size=text.tokens, trainable=training.mode == "full"),)


def end_ops(
    vision: VisionInput | None, audio: AudioInput | None, shape: Transformer, training: Training, x: Value
) -> tuple[Op, ...]:
    """What follows the last block, inside its layer: audio tokens pooled, class tokens dropped, final norm."""
    ops: list[Op] = []
    value = x
    if audio is not None and audio.pool > 1:
        value = Value("pooled", Rows("outputs"), shape.hidden)
        ops.append(Pool(x=x, y=value, size=audio.pool))
    if vision is not None and vision.class_token and not vision.keep_class_token:
        patches = image_patches(vision)
        value = Value("patches", Rows("outputs"), shape.hidden)
        ops.append(DropClassToken(x=x, y=value, period=None if patches is None else patches + 1))
    if shape.final_norm:
        normed = Value("final", value.rows, shape.hidden)
        trained, kind = training.mode == "full", shape.norm
        ops.append(Norm(name="final_norm", x=value, y=normed, kind=kind, trainable=trained, bias=shape.norm_bias))
    return tuple(ops)


def stored_ops(module: ModelModule, x: Value) -> tuple[Op, ...]:
    """Numbers that a module holds beside its products, in its first layer."""
    if not module.stored:
        return ()
    kept, trained = replace(x, name=f"{x.name}_kept"), module.training.mode == "full"
    return (Stored(name="stored", x=x, y=kept, size=module.stored, trainable=trained),)


def head_ops(vocabulary: Vocabulary, hidden: int, training: Training) -> tuple[Op, ...]:
    """[tokens, hidden] -> logits [tokens, vocabulary], split over tp ranks by vocabulary."""
    x = Value("x", TOKENS, hidden)
    logits = Value("logits", TOKENS, vocabulary.size, sharded=True, unit=vocabulary.pad_to)
    trained = training.mode == "full"
    tied = vocabulary.tied
    return (Linear(name="head", x=x, y=logits, bias=False, trainable=trained, parallel="column", tied=tied),)


def loss_ops(vocabulary: Vocabulary) -> tuple[Op, ...]:
    """logits -> one number."""
    logits = Value("x", TOKENS, vocabulary.size, sharded=True, unit=vocabulary.pad_to)
    return (CrossEntropy(x=logits, y=Value("loss", Rows("sequences"), 1)),)
