"""The signatures of TransformerEngine's modules and of their calls (2.20, d0067d0): names, order and defaults."""

from hqsweep.compat.arguments import SAYS_NOTHING, Signature

OVERLAPS = ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_wgrad", "ub_bulk_dgrad")
"""Arguments of layers without an effect: they need ub_tp_comm_overlap, which is refused."""
HINTS = ("layer_number", "seq_length", "micro_batch_size", *OVERLAPS, *SAYS_NOTHING)
OF_CALL = ("is_first_microbatch", "fast_zero_fill")
"""Arguments of calls without an effect: quantization(cache_weights=True) keeps the operands of unchanged weights."""
_UB = dict.fromkeys(
    ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"), False
)  # fmt: skip

LINEAR = Signature(
    kind="Linear",
    defaults={
        "sequence_parallel": False, "fuse_wgrad_accumulation": False, "tp_group": None, "tp_size": 1,
        "get_rng_state_tracker": None, "rng_tracker_name": None, "init_method": None, "bias": True,
        "return_bias": False, "params_dtype": None, "parallel_mode": None, "parameters_split": None, "device": "cuda",
        **_UB, "ub_name": None, "delay_wgrad_compute": False, "symmetric_ar_type": None, "save_original_input": False,
        "name": None,
    },
    refused=(*_UB, "symmetric_ar_type"),
)  # fmt: skip
LAYERNORM_LINEAR = Signature(
    kind="LayerNormLinear",
    defaults={
        "eps": 1e-5, "sequence_parallel": False, "fuse_wgrad_accumulation": False, "tp_group": None, "tp_size": 1,
        "get_rng_state_tracker": None, "init_method": None, "bias": True, "normalization": "LayerNorm",
        "return_bias": False, "params_dtype": None, "parallel_mode": None, "return_layernorm_output": False,
        "return_layernorm_output_gathered": False, "parameters_split": None, "zero_centered_gamma": False,
        "device": "cuda", "ub_overlap_ag": False, "ub_overlap_rs": False, "ub_overlap_rs_dgrad": False,
        "ub_bulk_wgrad": False, "ub_bulk_dgrad": False, "ub_name": None, "delay_wgrad_compute": False,
        "symmetric_ar_type": None, "name": None,
    },
    refused=(*_UB, "symmetric_ar_type"),
)  # fmt: skip
OF_LINEAR_CALL = Signature(
    kind="forward",
    defaults={"is_first_microbatch": None, "fp8_output": False, "fp8_grad": False},
    refused=("fp8_output", "fp8_grad"),
    hints=OF_CALL,
)
OF_MLP_CALL = Signature(kind="LayerNormMLP", defaults={"is_first_microbatch": None}, hints=OF_CALL)
LAYERNORM_MLP = Signature(
    kind="LayerNormMLP",
    defaults={
        "eps": 1e-5, "sequence_parallel": False, "return_bias": False, "get_rng_state_tracker": None, "tp_group": None,
        "tp_size": 1, "init_method": None, "bias": True, "normalization": "LayerNorm", "activation": "gelu",
        "activation_params": None, "output_layer_init_method": None, "fuse_wgrad_accumulation": False,
        "params_dtype": None, "return_layernorm_output": False, "return_layernorm_output_gathered": False,
        "seq_length": None, "micro_batch_size": None, "set_parallel_mode": False, "zero_centered_gamma": False,
        "device": "cuda", "ub_overlap_ag": False, "name": None, "ub_overlap_rs": False, "ub_overlap_rs_dgrad": False,
        "ub_bulk_dgrad": False, "ub_bulk_wgrad": False, "delay_wgrad_compute": False, "symmetric_ar_type": None,
        "checkpoint": False,
    },
    refused=("symmetric_ar_type",),
    hints=(*HINTS, "checkpoint"),
)  # fmt: skip
GROUPED_LINEAR = Signature(
    kind="GroupedLinear",
    defaults={
        "sequence_parallel": False, "fuse_wgrad_accumulation": False, "tp_group": None, "tp_size": 1,
        "get_rng_state_tracker": None, "rng_tracker_name": None, "init_method": None, "bias": True,
        "return_bias": False, "params_dtype": None, "parallel_mode": None, "device": "cuda", "ub_overlap_rs": False,
        "ub_overlap_ag": False, "ub_name": None, "delay_wgrad_compute": False, "save_original_input": False,
        "single_grouped_weight": False, "single_grouped_bias": False, "name": None, "use_grouped_tensor": None,
    },
    refused=("ub_overlap_rs", "ub_overlap_ag"),
    hints=(*SAYS_NOTHING, "use_grouped_tensor"),
)  # fmt: skip
OF_GROUPED_CALL = Signature(
    kind="forward",
    defaults={"is_first_microbatch": None, "out": None, "dgrad_out": None},
    refused=("out", "dgrad_out"),
    hints=OF_CALL,
)
MULTIHEAD_ATTENTION = Signature(
    kind="MultiheadAttention",
    defaults={
        "kv_channels": None, "attention_dropout": 0.1, "layernorm_epsilon": 1e-5, "init_method": None,
        "output_layer_init_method": None, "layer_number": None, "attn_mask_type": "causal", "window_size": None,
        "bottom_right_diagonal": None, "tp_group": None, "tp_size": 1, "num_gqa_groups": None,
        "fuse_wgrad_accumulation": False, "get_rng_state_tracker": None, "sequence_parallel": False,
        "params_dtype": None, "return_bias": False, "return_layernorm_output": False, "input_layernorm": False,
        "attention_type": "self", "set_parallel_mode": False, "fuse_qkv_params": False, "zero_centered_gamma": False,
        "qkv_weight_interleaved": True, "rotary_pos_interleaved": False, **dict.fromkeys(OVERLAPS[:3], False),
        "ub_bulk_dgrad": False, "ub_bulk_wgrad": False, "bias": True, "normalization": "LayerNorm", "device": "cuda",
        "qkv_format": "sbhd", "name": None, "qk_norm_type": None, "qk_norm_eps": 1e-6, "qk_norm_before_rope": False,
        "seq_length": None, "micro_batch_size": None, "softmax_type": "vanilla",
    },
    hints=HINTS,
)  # fmt: skip
TRANSFORMER_LAYER = Signature(
    kind="TransformerLayer",
    defaults={
        "num_gqa_groups": None, "layernorm_epsilon": 1e-5, "hidden_dropout": 0.1, "attention_dropout": 0.1,
        "init_method": None, "output_layer_init_method": None, "layer_number": None, "kv_channels": None,
        "self_attn_mask_type": "causal", "window_size": None, "bottom_right_diagonal": None,
        "enc_dec_attn_mask_type": "no_mask", "enc_dec_bottom_right_diagonal": None, "enc_dec_window_size": None,
        "tp_group": None, "tp_size": 1, "params_dtype": None, "get_rng_state_tracker": None,
        "fuse_wgrad_accumulation": False, "seq_length": None, "micro_batch_size": None, "sequence_parallel": False,
        "apply_residual_connection_post_layernorm": False, "output_layernorm": False, "parallel_attention_mlp": False,
        "layer_type": "encoder", "drop_path_rate": 0.0, "set_parallel_mode": False, "fuse_qkv_params": False,
        "rotary_pos_interleaved": False, "zero_centered_gamma": False, "qkv_weight_interleaved": True,
        "ub_tp_comm_overlap": False, "ub_overlap_ag": True, "ub_overlap_rs": True, "ub_overlap_rs_dgrad": False,
        "ub_bulk_dgrad": True, "ub_bulk_wgrad": True, "bias": True, "activation": "gelu", "activation_params": None,
        "normalization": "LayerNorm", "device": "cuda", "attn_input_format": "sbhd", "name": None, "qk_norm_type": None,
        "qk_norm_eps": 1e-6, "qk_norm_before_rope": False, "softmax_type": "vanilla",
    },
    refused=("ub_tp_comm_overlap",),
    hints=HINTS,
)  # fmt: skip
_OF_CORE = {
    "is_first_microbatch": None, "checkpoint_core_attention": False, "inference_params": None, "rotary_pos_emb": None,
    "core_attention_bias_type": "no_bias", "core_attention_bias": None, "alibi_slopes": None, "cu_seqlens_q": None,
    "cu_seqlens_kv": None, "cu_seqlens_q_padded": None, "cu_seqlens_kv_padded": None, "max_seqlen_q": None,
    "max_seqlen_kv": None, "fast_zero_fill": True, "pad_between_seqs": None,
}  # fmt: skip
OF_ATTENTION_CALL = Signature(
    kind="MultiheadAttention",
    defaults={
        "attention_mask": None, "encoder_output": None, "attn_mask_type": None, "window_size": None,
        "bottom_right_diagonal": None, **_OF_CORE,
    },
    refused=("inference_params",),
    hints=OF_CALL,
)  # fmt: skip
OF_LAYER_CALL = Signature(
    kind="TransformerLayer",
    defaults={
        "attention_mask": None, "self_attn_mask_type": None, "window_size": None, "bottom_right_diagonal": None,
        "encoder_output": None, "enc_dec_attn_mask": None, "enc_dec_attn_mask_type": None, "enc_dec_window_size": None,
        "enc_dec_bottom_right_diagonal": None, **_OF_CORE,
    },
    refused=("inference_params",),
    hints=OF_CALL,
)  # fmt: skip
DOT_PRODUCT_ATTENTION = Signature(
    kind="DotProductAttention",
    defaults={
        "num_gqa_groups": None, "attention_dropout": 0.0, "qkv_format": "sbhd", "attn_mask_type": "causal",
        "window_size": None, "bottom_right_diagonal": None, "sequence_parallel": False, "tp_size": 1,
        "get_rng_state_tracker": None, "tp_group": None, "layer_number": None, "attention_type": "self",
        "cp_group": None, "cp_global_ranks": None, "cp_stream": None, "cp_comm_type": "p2p", "softmax_scale": None,
        "softmax_type": "vanilla", "return_max_logit": False, "name": None,
    },
    refused=("cp_group", "cp_global_ranks", "cp_stream"),
    hints=("sequence_parallel", "layer_number", "cp_comm_type", *SAYS_NOTHING),
)  # fmt: skip
OF_DOT_PRODUCT_CALL = Signature(
    kind="DotProductAttention",
    defaults={
        "query_layer": None, "key_layer": None, "value_layer": None, "attention_mask": None, "qkv_format": None,
        "cu_seqlens_q": None, "cu_seqlens_kv": None, "cu_seqlens_q_padded": None, "cu_seqlens_kv_padded": None,
        "max_seqlen_q": None, "max_seqlen_kv": None, "attn_mask_type": None, "window_size": None,
        "bottom_right_diagonal": None, "checkpoint_core_attention": False, "core_attention_bias_type": "no_bias",
        "core_attention_bias": None, "alibi_slopes": None, "fast_zero_fill": True, "inference_params": None,
        "pad_between_seqs": None, "fp8_output": False, "bf16_backward": False, "num_splits": 1, "score_mod": None,
        "score_mod_bprop": None, "score_mod_tensors": None, "score_mod_bprop_tensors": None, "qkv_layer": None,
        "kv_layer": None, "qkv_interleave_dim": -3,
    },
    refused=("inference_params", "fp8_output", "bf16_backward", "score_mod", "score_mod_bprop", "score_mod_tensors",
             "score_mod_bprop_tensors"),
    hints=("fast_zero_fill", "num_splits"),
)  # fmt: skip
