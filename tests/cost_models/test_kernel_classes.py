"""Kernel names of libraries and compilers, and what they do."""

import pytest

from mmplan.cost_models.traces.kernel_classes import collective, kernel_class, short_name
from mmplan.cost_models.traces.modules_of import part_of

CLASSES = {
    "gemm": (
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn",
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>(Params)",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>",
        "triton_tem_fused_mm_7",
        "void deep_gemm::fp8_gemm_kernel<7168u>",
    ),
    "attention": (
        "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t> >(Params)",
        "void cutlass::device_kernel<flash::FlashAttnBwdSm90<flash::CollectiveMainloopBwd<2>>>(Params)",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3",
        "void ck_tile::kentry<256, 2, ck_tile::FmhaFwdKernel<...>>(FmhaFwdKargs)",
        "_attn_fwd.kd",
    ),
    "communication": (
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
        "void deep_ep::intranode::dispatch<8, 768>(int4*)",
        "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(RankData*)",
        "mscclKernel_Sum_half_Simple",
    ),
    "optimizer": (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMath>",
        "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>(int)",
    ),
    "norm": (
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>(int, float)",
        "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<...>",
        "_layer_norm_bwd_kernel",
    ),
    "convolution": (
        "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize64x128x32",
        "void cudnn::cnn::conv2d_grouped_direct_kernel<float>",
        "miopenSp3AsmConv_v30_3_1_gfx9_fp32_f2x3_stride1",
    ),
    "elementwise": (
        "triton_poi_fused_add_cos_sin_0",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, Array<char*, 3> >(int)",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>(R)",
        "swiglu_f16",
    ),
    "embedding and index": (
        "fbgemm_gpu::permute_2D_lengths_kernel<int>",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long>(TensorInfo)",
    ),
    "softmax and loss": ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>",),
    "other": ("my_kernel", "", "k" * 100_000),
}


@pytest.mark.parametrize(("expected", "name"), [(kind, name) for kind, names in CLASSES.items() for name in names])
def test_a_kernel_has_its_class(expected: str, name: str) -> None:
    assert kernel_class(name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*)", "all_gather"),
        ("nccl:_reduce_scatter_base", "reduce_scatter"),
        ("all_to_allv", "all_to_all"),
        ("allreduce_coalesced", "all_reduce"),
        ("ncclDevKernel_Broadcast_RING_LL", "broadcast"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage)", "unnamed collective"),
    ],
)
def test_collectives_are_named_as_we_name_them(name: str, expected: str) -> None:
    assert collective(name) == expected


def test_a_name_is_shown_without_parameters_and_return_type() -> None:
    assert short_name("void at::native::(anonymous namespace)::f<int(*)(int)>(int, float*)") == (
        "at::native::(anonymous namespace)::f<int(*)(int)>"
    )
    assert len(short_name("x" * 5_000)) == 120


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nn.Module: SiglipVisionModel_0", "vision"),
        ("nn.Module: Qwen2_5_VisionTransformerPretrainedModel_0", "vision"),
        ("nn.Module: CLIPTextModel_0", "text"),
        ("nn.Module: LlavaNextMultiModalProjector_0", "projector"),
        ("nn.Module: Qwen2_5OmniAudioEncoder_0", "audio"),
        ("nn.Module: LlamaForCausalLM_0", "text"),
        ("nn.Module: Qwen2VLForConditionalGeneration_0", None),
        ("nn.Module: Linear_3", None),
        ("vision_tower forward", "vision"),
        ("language_model", "text"),
        ("mm_projector", "projector"),
        ("ProfilerStep#3", None),
        ("aten::mm", None),
        ("clip_grad_norm", None),
        ("image_loss", None),
        ("allreduce", None),
    ],
)
def test_a_range_belongs_to_the_part_that_its_words_name(name: str, part: str | None) -> None:
    found = part_of(name)
    assert (found and found[0]) == part
