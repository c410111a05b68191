"""Arguments of Megatron that decide no memory of a training step, or that only another argument makes anybody read.

Names are those of the parsed arguments (`dest`), with `*` for any ending. Whatever is neither here nor turned into a
field of a workload (`labkit.importers.fields.EXPRESSED`) is reported as not expressed.
"""

from fnmatch import fnmatchcase

_CONDITIONAL = "read only where another argument asks for it, which is then named"
_REASONS = {
    "paths, data and tokenizers; the vocabulary's size is a field": """
        data_path data_args_path train_data_path valid_data_path test_data_path per_split_data_args_path split
        per_dataset_sequences_path data_cache_path mmap_bin_files mock_data dataloader_fast_cache_load
        dataloader_defer_npy_index_mmap dataloader_type num_workers num_dataset_builder_threads
        mid_level_dataset_surplus object_storage_cache_path phase_transition_iterations sample_rate mask_prob
        short_seq_prob reset_position_ids reset_attention_mask eod_mask_loss allow_ambiguous_pad_tokens fim_*
        vocab_file merge_file vocab_extra_ids tokenizer_type tokenizer_model metadata_path special_tokens tiktoken_*
        tokenizer_* trust_remote_code null_tokenizer_* chat_template sft_tokenizer_prompt_format data_sharding""",
    "logging and profiling": """
        log_interval log_params_norm log_throughput log_progress log_timers_to_tensorboard
        log_loss_scale_to_tensorboard log_validation_ppl_to_tensorboard log_memory_to_tensorboard
        log_memory_interval log_device_memory_used log_world_size_to_tensorboard log_energy log_straggler
        logging_level timing_log_level timing_log_option tensorboard_* wandb_* barrier_with_L1_time
        moe_per_layer_logging straggler_* disable_straggler_on_startup run_workload_inspector_server
        enable_one_logger one_logger_* app_tag_run_* profile profile_* use_pytorch_profiler pytorch_profiler_*
        record_memory_history memory_snapshot_path record_shapes nvtx_ranges config_logger_dir
        dump_param_to_param_group_map""",
    "when to stop, check, skip, evaluate and restart": """
        train_iters train_samples exit_* iterations_to_skip result_rejected_tracker_filename train_sync_interval
        manual_gc manual_gc_* eval_iters eval_interval start_eval_at_iter full_validation multiple_validation_sets
        validation_set_names test_mode check_for_nan_in_loss_and_grad check_for_large_grads check_for_spiky_loss
        check_weight_hash_across_dp_replicas_interval gpu_sniff_test_interval rerun_mode error_injection_*
        inprocess_* enable_ft_package calc_ft_timeouts ft_num_warmup_iters fault_injector_* adlr_autoresume*
        decrease_batch_size_if_needed""",
    "learning rates, weight decay, coefficients, scales, seeds and initial values": """
        lr lr_* min_lr decoupled_lr decoupled_min_lr warmup start_weight_decay end_weight_decay weight_decay
        weight_decay_incr_style apply_wd_to_qk_layernorm no_weight_decay_cond_type adam_* sgd_momentum clip_grad
        override_opt_param_scheduler use_checkpoint_opt_param_scheduler loss_scale initial_loss_scale min_loss_scale
        loss_scale_window hysteresis seed data_parallel_random_init init_method_* embedding_init_method_std
        perform_initialization use_cpu_initialization layernorm_epsilon layernorm_zero_centered_gamma
        moe_router_bias_update_rate mtp_loss_scaling_factor calculate_per_token_loss""",
    "checkpoints": """
        save save_interval save_retain_interval load load_main_params_from_ckpt non_persistent_* finetune
        pretrained_checkpoint ckpt_* exit_on_missing_checkpoint auto_detect_ckpt_format async_*
        use_persistent_ckpt_worker strict_fsdp_dtensor_load dist_ckpt_*
        distrib_optim_fully_reshardable_mem_efficient replication replication_* verify_integrity stream_ckpt_dequant
        no_save_optim no_save_rng no_load_optim no_load_rng override_ckpt_iteration use_dist_ckpt_deprecated
        use_tokenizer_model_from_checkpoint_args enable_msc disable_msc_deprecated""",
    "process groups, the order of ranks and timeouts": """
        distributed_backend distributed_timeout_* local_rank lazy_mpu_init nccl_communicator_config_path
        use_tp_pp_dp_mapping use_gloo_process_groups use_sharp sharp_enabled_group high_priority_stream_groups
        high_priority_a2a_comm_stream flight_recorder_* te_rng_tracker inference_rng_tracker fake_process_group""",
    "what layers do not read, or read as a number": """
        deprecated_use_mcore_models use_flash_attn rotary_seq_len_interpolation_factor use_rope_scaling
        rope_scaling_factor rotary_scaling_factor mscale mscale_all_dim yarn_beta_* yarn_correction_*""",
    _CONDITIONAL: """
        inference_* rl_* grpo_* langrl_env_config refit_method max_tokens_to_oom decode_only_cuda_graphs
        moe_pad_experts_for_cuda_graph_inference mamba_inference_* muon_* lion_* dsa_* mup_* fp8_margin fp8_interval
        fp8_amax_* fp8_wgrad first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp4_recipe
        cuda_graph_modules cuda_graph_warmup_steps cuda_graph_scope_deprecated offload_modules
        min_offloaded_tensor_size activation_offload_fraction optimizer_offload_fraction pin_cpu_grads
        pin_cpu_params qk_clip_* data_parallel_sharding_strategy outer_dp_sharding_strategy fsdp_* megatron_fsdp_*
        keep_fp8_transpose_cache enable_full_sharding_in_hsdp create_all_gather_group
        suggested_communication_unit_size torch_fsdp2_reshard_after_forward gradient_reduce_div_fusion
        tp_comm_bulk_* tp_comm_overlap_* tp_comm_split_* tp_comm_bootstrap_backend moe_flex_dispatcher_num_sms
        moe_hybridep_num_sms_preprocessing relative_attention_* moe_upcycling_granularity""",
    "of programs for other models": """
        bert_* biencoder_* ict_* img_h img_w num_classes num_channels patch_dim classes_fraction
        data_per_class_fraction head_lr_mult vision_* swin_backbone_type mask_type mask_factor iter_per_epoch dino_*
        titles_data_path query_in_block_prob use_one_sent_docs evidence_data_path retriever_* block_data_path
        embedding_path indexer_*""",
}

SILENT = tuple(name for names in _REASONS.values() for name in names.split())


def is_conditional(name: str) -> bool:
    """Whether an argument of this name matters only where another one, which no field expresses, is given."""
    return any(fnmatchcase(name, pattern) for pattern in _REASONS[_CONDITIONAL].split())


def decides_no_memory(name: str) -> bool:
    """Whether an argument of this name (`dest`) changes nothing that a workload could say."""
    return any(fnmatchcase(name, pattern) for pattern in SILENT)
