"""Arguments that change what a step costs and are not priced, and those by which tools that do not train are known."""

from collections.abc import Mapping

NOT_PRICED: Mapping[str, str] = {
    "cpu_offloading": "activations in host memory are not read from here: `technique.offload: activations` prices them",
    "swap_attention": "activations in host memory are not read from here: `technique.offload: activations` prices them",
    "mtp_num_layers": "layers that predict further tokens are not priced",
    "encoder_tensor_model_parallel_size": "the encoder's own degrees are not read; the recipe holds the decoder's",
    "encoder_pipeline_model_parallel_size": "the encoder's own stages are not read; the recipe holds the decoder's",
    "encoder_tp": "the encoder's own devices are not read; the recipe holds the language model's",
    "tp_comm_overlap": "overlap of tensor-parallel communication is that of the stack",
    "defer_embedding_wgrad_compute": "its order of work is not priced",
    "overlap_moe_expert_parallel_comm": "overlap of the experts' communication is not priced",
    "use_precision_aware_optimizer": "optimizer states of fewer bits are not priced",
    "main_params_dtype": "optimizer states of other bits are not priced",
    "exp_avg_dtype": "optimizer states of other bits are not priced",
    "reuse_fp32_param": "the saved copy of the weights is not priced",
    "use_mc2": "overlap of tensor-parallel communication is that of the stack",
    "linear_attention_freq": "linear attention layers are not read; every layer is priced with full attention",
    "model_provider": "encoders that this provider builds in code are not in the file and are left out",
    "recipe": "what this recipe sets in code is not in the file; read are the arguments alone",
    "rlhf_type": "rollouts and passes of reference models are not priced; a step is the training pass alone",
    "rollout_batch_size": "rollouts are not priced; a step is the training pass alone",
    "ref_load": "passes of the reference model are not priced",
    "audio_encoder_model": "the audio encoder's sizes are not in the file and are left out",
    "load_in_4bit": "quantised weights are not priced",
    "load_in_8bit": "quantised weights are not priced",
    "quant_bits": "quantised weights are not priced",
    "quantization_bit": "quantised weights are not priced",
    "hybrid_shard": "states are sharded inside nodes and copied over them; priced as sharded over all devices",
    "hierarchical_context_parallel_sizes": "its levels are not read",
    "num_distributed_optimizer_instances": "replicated shards of the optimizer are not priced",
    "init_model_with_meta_device": "weights are priced as resident",
}

_MAMBA = "layers of state-space models (Mamba) are not modelled"
UNMODELLED: Mapping[str, str] = {
    "hybrid_layer_pattern": _MAMBA,
    "hybrid_override_pattern": _MAMBA,
    "hybrid_attention_ratio": _MAMBA,
    "is_hybrid_model": _MAMBA,
    "retro_add_retriever": "models that retrieve (Retro) are not modelled",
    "vision_pretraining": "training of a vision model alone is not modelled",
}

# All of the marks of a row must stand.
REFUSED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("output_prefix", "tokenizer_type"), "a script that preprocesses data"),
    (("output_prefix", "input"), "a script that preprocesses data"),
    (("out_seq_length",), "a text generation script"),
    (("sample_input_file",), "a text generation script"),
    (("max_tokens_to_oom",), "a text generation script"),
    (("num_tokens_to_generate",), "a text generation script"),
    (("max_new_tokens", "infer_backend"), "an inference script"),
    (("target_tensor_parallel_size",), "a script that converts checkpoints"),
    (("loader", "saver"), "a script that converts checkpoints"),
    (("load_dir", "save_dir", "model_type"), "a script that converts checkpoints"),
    (("to_mcore",), "a script that converts checkpoints"),
    (("to_hf",), "a script that converts checkpoints"),
)
