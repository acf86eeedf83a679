"""Signatures of TransformerEngine's public API (2.20, d0067d0), one for each name: constructors, functions, and calls
of modules. test_arguments.py beside this file reads them."""

SIGNATURES = """\
Linear(in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None, tp_size=1,
    get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True, return_bias=False,
    params_dtype=None, parallel_mode=None, parameters_split=None, device='cuda', ub_overlap_ag=False,
    ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False, ub_name=None,
    delay_wgrad_compute=False, symmetric_ar_type=None, save_original_input=False, name=None)
Linear.forward(inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False)
LayerNormLinear(in_features, out_features, eps=1e-05, sequence_parallel=False, fuse_wgrad_accumulation=False,
    tp_group=None, tp_size=1, get_rng_state_tracker=None, init_method=None, bias=True, normalization='LayerNorm',
    return_bias=False, params_dtype=None, parallel_mode=None, return_layernorm_output=False,
    return_layernorm_output_gathered=False, parameters_split=None, zero_centered_gamma=False, device='cuda',
    ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_wgrad=False, ub_bulk_dgrad=False,
    ub_name=None, delay_wgrad_compute=False, symmetric_ar_type=None, name=None)
LayerNormLinear.forward(inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False)
LayerNormMLP(hidden_size, ffn_hidden_size, eps=1e-05, sequence_parallel=False, return_bias=False,
    get_rng_state_tracker=None, tp_group=None, tp_size=1, init_method=None, bias=True, normalization='LayerNorm',
    activation='gelu', activation_params=None, output_layer_init_method=None, fuse_wgrad_accumulation=False,
    params_dtype=None, return_layernorm_output=False, return_layernorm_output_gathered=False, seq_length=None,
    micro_batch_size=None, set_parallel_mode=False, zero_centered_gamma=False, device='cuda', ub_overlap_ag=False,
    name=None, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False,
    delay_wgrad_compute=False, symmetric_ar_type=None, checkpoint=False)
LayerNormMLP.forward(inp, is_first_microbatch=None)
GroupedLinear(num_gemms, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False,
    tp_group=None, tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True,
    return_bias=False, params_dtype=None, parallel_mode=None, device='cuda', ub_overlap_rs=False, ub_overlap_ag=False,
    ub_name=None, delay_wgrad_compute=False, save_original_input=False, single_grouped_weight=False,
    single_grouped_bias=False, name=None, use_grouped_tensor=None)
GroupedLinear.forward(inp, m_splits, is_first_microbatch=None, out=None, dgrad_out=None)
MultiheadAttention(hidden_size, num_attention_heads, kv_channels=None, attention_dropout=0.1, layernorm_epsilon=1e-05,
    init_method=None, output_layer_init_method=None, layer_number=None, attn_mask_type='causal', window_size=None,
    bottom_right_diagonal=None, tp_group=None, tp_size=1, num_gqa_groups=None, fuse_wgrad_accumulation=False,
    get_rng_state_tracker=None, sequence_parallel=False, params_dtype=None, return_bias=False,
    return_layernorm_output=False, input_layernorm=False, attention_type='self', set_parallel_mode=False,
    fuse_qkv_params=False, zero_centered_gamma=False, qkv_weight_interleaved=True, rotary_pos_interleaved=False,
    ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False,
    bias=True, normalization='LayerNorm', device='cuda', qkv_format='sbhd', name=None, qk_norm_type=None,
    qk_norm_eps=1e-06, qk_norm_before_rope=False, seq_length=None, micro_batch_size=None, softmax_type='vanilla')
MultiheadAttention.forward(hidden_states, attention_mask=None, encoder_output=None, attn_mask_type=None,
    window_size=None, bottom_right_diagonal=None, is_first_microbatch=None, checkpoint_core_attention=False,
    inference_params=None, rotary_pos_emb=None, core_attention_bias_type='no_bias', core_attention_bias=None,
    alibi_slopes=None, cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None,
    max_seqlen_q=None, max_seqlen_kv=None, fast_zero_fill=True, pad_between_seqs=None)
DotProductAttention(num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, qkv_format='sbhd',
    attn_mask_type='causal', window_size=None, bottom_right_diagonal=None, sequence_parallel=False, tp_size=1,
    get_rng_state_tracker=None, tp_group=None, layer_number=None, attention_type='self', cp_group=None,
    cp_global_ranks=None, cp_stream=None, cp_comm_type='p2p', softmax_scale=None, softmax_type='vanilla',
    return_max_logit=False, name=None)
DotProductAttention.forward(query_layer=None, key_layer=None, value_layer=None, attention_mask=None, qkv_format=None,
    cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None,
    max_seqlen_kv=None, attn_mask_type=None, window_size=None, bottom_right_diagonal=None,
    checkpoint_core_attention=False, core_attention_bias_type='no_bias', core_attention_bias=None, alibi_slopes=None,
    fast_zero_fill=True, inference_params=None, pad_between_seqs=None, fp8_output=False, bf16_backward=False,
    num_splits=1, score_mod=None, score_mod_bprop=None, score_mod_tensors=None, score_mod_bprop_tensors=None,
    qkv_layer=None, kv_layer=None, qkv_interleave_dim=-3)
TransformerLayer(hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups=None, layernorm_epsilon=1e-05,
    hidden_dropout=0.1, attention_dropout=0.1, init_method=None, output_layer_init_method=None, layer_number=None,
    kv_channels=None, self_attn_mask_type='causal', window_size=None, bottom_right_diagonal=None,
    enc_dec_attn_mask_type='no_mask', enc_dec_bottom_right_diagonal=None, enc_dec_window_size=None, tp_group=None,
    tp_size=1, params_dtype=None, get_rng_state_tracker=None, fuse_wgrad_accumulation=False, seq_length=None,
    micro_batch_size=None, sequence_parallel=False, apply_residual_connection_post_layernorm=False,
    output_layernorm=False, parallel_attention_mlp=False, layer_type='encoder', drop_path_rate=0.0,
    set_parallel_mode=False, fuse_qkv_params=False, rotary_pos_interleaved=False, zero_centered_gamma=False,
    qkv_weight_interleaved=True, ub_tp_comm_overlap=False, ub_overlap_ag=True, ub_overlap_rs=True,
    ub_overlap_rs_dgrad=False, ub_bulk_dgrad=True, ub_bulk_wgrad=True, bias=True, activation='gelu',
    activation_params=None, normalization='LayerNorm', device='cuda', attn_input_format='sbhd', name=None,
    qk_norm_type=None, qk_norm_eps=1e-06, qk_norm_before_rope=False, softmax_type='vanilla')
TransformerLayer.forward(hidden_states, attention_mask=None, self_attn_mask_type=None, window_size=None,
    bottom_right_diagonal=None, encoder_output=None, enc_dec_attn_mask=None, enc_dec_attn_mask_type=None,
    enc_dec_window_size=None, enc_dec_bottom_right_diagonal=None, is_first_microbatch=None,
    checkpoint_core_attention=False, inference_params=None, rotary_pos_emb=None, core_attention_bias_type='no_bias',
    core_attention_bias=None, alibi_slopes=None, cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None,
    cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None, fast_zero_fill=True, pad_between_seqs=None)
HybridQuantizer(*, rowwise_quantizer, columnwise_quantizer, columnwise_source='original')
IdentityQuantizer(*, dtype=None, rowwise=True, columnwise=True)
Float8CurrentScalingQuantizer(fp8_dtype, device, *, rowwise=True, columnwise=True, use_existing_amax=False,
    with_amax_reduction=False, amax_reduction_group=None, force_pow_2_scales=False, amax_epsilon=0.0, scale=None,
    amax=None)
Float8BlockQuantizer(fp8_dtype, *, rowwise, columnwise, amax_epsilon=0.0, force_pow_2_scales=True,
    block_scaling_dim=2)
MXFP8Quantizer(fp8_dtype, *, rowwise=True, columnwise=True, with_2d_quantization=False)
NVFP4Quantizer(fp4_dtype=DType.kFloat4E2M1, rowwise=True, columnwise=True, with_amax_reduction=False,
    amax_reduction_group=None, with_rht=False, with_post_rht_amax=False, with_2d_quantization=False,
    stochastic_rounding=False, row_scaled_nvfp4=False, nvfp4_use_4over6=False, nvfp4_e4m3_max=448,
    nvfp4_4over6_err_mode='MAE', with_random_sign_mask=True)
CustomRecipe(qfactory, fp8_format=Format.HYBRID, fp8_dpa=False, fp8_mha=False, backward_override=None,
    quantization_alignment=128)
DelayedScalingRequest(fp8_format=Format.HYBRID, margin=0, amax_history_len=1024, amax_compute_algo='max',
    scaling_factor_compute_algo=None, reduce_amax=True)
quantized_model_init(enabled=True, recipe=None, preserve_high_precision_init_val=False)
autocast(enabled=True, calibrating=False, recipe=None, amax_reduction_group=None, _graph=False)
"""
