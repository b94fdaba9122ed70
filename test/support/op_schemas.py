"""Facts about the ops of sglang-kernel 0.4.10 that the race detector relies on."""

# These return an operand, although the schema declares a new tensor.
RETURN_OPERANDS = {
    "sgl_kernel::weak_ref_tensor": "(Tensor tensor) -> Tensor",
    "sgl_kernel::dense_decode_fwd": (
        "(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, Tensor block_table, float softmax_scale, "
        "bool is_causal, Tensor? tile_scheduler_metadata, Tensor? num_splits) -> (Tensor, Tensor, Tensor?, Tensor?)"
    ),
    "sgl_kernel::sparse_decode_fwd": (
        "(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink, "
        "Tensor? tile_scheduler_metadata, Tensor? num_splits, Tensor? extra_kv, Tensor? extra_indices, "
        "Tensor? extra_topk_length, int d_v, float sm_scale, str? kv_format=None) -> (Tensor, Tensor, Tensor?, Tensor?)"
    ),
}
# All others that return a tensor without an alias mark. They return new tensors.
RETURN_NEW_TENSORS = frozenset(
    "sgl_kernel::" + name
    for name in (
        "flash_mla_mega_decode",
        "flash_mla_mega_permute_q",
        "flash_mla_mega_permute_wo",
        "flash_mla_mega_prefill",
        "fp8_scaled_mm",
        "fwd",
        "fwd_kvcache_mla",
        "fwd_kvcache_mla_fp8",
        "get_mla_decoding_metadata",
        "get_mla_decoding_metadata_dense_fp8",
        "get_scheduler_metadata",
        "ggml_dequantize",
        "ggml_moe_a8",
        "ggml_moe_a8_vec",
        "ggml_mul_mat_a8",
        "ggml_mul_mat_vec_a8",
        "int8_scaled_mm",
        "sparse_prefill_fwd",
    )
)
