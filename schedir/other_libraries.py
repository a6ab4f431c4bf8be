"""Map the names of other libraries and of papers to schedir's names.

`schedir.retired_names` has the functions that suggest these names.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

# Names of arguments and options in torch, Megatron-LM, DeepSpeed and papers -> schedir's names,
# separated by spaces.
OTHER_NAMES: Final = {
    name: new
    for new, names in {
        "ranks pp": "num_ranks n_ranks pipeline_parallel_size pipeline_model_parallel_size pp_size "
        "world_size P pp ranks pipeline_parallel pipeline_model_parallel pipeline_parallel_degree",
        "microbatches": "n_microbatches num_microbatches chunks gradient_accumulation_steps M "
        "grad_accum_steps gradient_accumulation accumulation_steps",
        "stages_per_rank": "num_stages n_stages stages v vpp n_chunks num_chunks "
        "virtual_pipeline_model_parallel_size virtual_stages num_virtual_stages virtual_chunks "
        "virtual_pipeline_size num_model_chunks model_chunks",
        "tp": "tp_size tensor_parallel_size tensor_model_parallel_size tensor_parallel "
        "tensor_model_parallel tensor_parallel_degree",
        "dp": "dp_size data_parallel_size replicas data_parallel ddp data_parallel_degree "
        "data_parallel_replicate_degree",
        "cp": "cp_size context_parallel_size context_parallel context_parallel_degree",
        "ep": "ep_size expert_parallel_size expert_model_parallel_size expert_parallel "
        "expert_model_parallel expert_parallel_degree",
        "batch": "global_batch_size",
        "costs": "cost times",
        "F": "f fwd forward forward_time",
        "B": "b bwd backward backward_time",
        "send": "comm p2p communication",
        "sizes": "size bytes",
        "zero": "zero_stage zero_level fsdp sharding_strategy",
        "memory_limit": "memory max_memory",
        "recompute": "recomputation recompute_activations recompute_granularity "
        "activation_checkpointing checkpoint_activations gradient_checkpointing",
        "offload": "cpu_offload cpu_offloading offload_activations activation_offload",
        "optimizer_placement": "offload_optimizer optimizer_offload optimizer_cpu_offload",
        "clip_grad_norm": "clip_grad grad_clip gradient_clipping max_grad_norm max_norm "
        "gradient_clip gradient_clip_val clip_norm clip_gradients",
        "overlap": "overlap_p2p_communication overlap_comm",
        "schedule": "schedule_name",
        "loss": "loss_fn criterion",
        "loss_fn": "loss criterion",
        "optimizer": "optim optimizers",
        "step": "iteration",
        "directory": "dir path checkpoint_dir",
        "cluster": "hardware machines",
        "nodes": "num_nodes n_nodes",
        "name": "title",
        "lr": "learning_rate",
        "steps": "epochs iterations max_steps num_steps train_iters",
        "microbatch_size": "batch_size micro_batch_size",
        "checkpoint_every": "save_every save_interval",
        "checkpoint_dir": "save save_dir",
        "layers": "num_layers n_layer n_layers",
        "heads": "num_heads n_head n_heads num_attention_heads",
        "hidden": "hidden_size d_model",
        "context sequence": "seq_length seq_len sequence_length max_seq_len n_positions n_ctx "
        "max_position_embeddings block_size",
        "kv_heads": "num_kv_heads n_kv_heads num_key_value_heads num_query_groups",
        "feed_forward ffn": "intermediate_size ffn_hidden_size ffn_size d_ff mlp_size",
        "experts": "num_experts n_experts num_local_experts",
        "active": "top_k num_experts_per_tok num_experts_per_token moe_router_topk",
        "theta": "rope_theta rope_base rotary_base",
        "eps": "rms_norm_eps norm_eps layer_norm_eps norm_epsilon",
        "tied": "tie_word_embeddings tie_embeddings share_embeddings",
        "warmup": "warmup_steps warmup_iters num_warmup_steps lr_warmup_iters",
        "log_every": "log_interval logging_steps log_freq",
        "evaluate_every": "eval_every eval_interval eval_steps",
        "evaluate_batches": "eval_iters eval_batches",
        "vocab": "vocab_size",
        "precision": "dtype bf16 fp16 mixed_precision torch_dtype",
        "step_time": "time step_seconds step_time_s step_time_ms iteration_time iteration_time_ms "
        "iter_time time_per_step time_ms elapsed_time",
        "tokens_per_second": "throughput tokens_per_sec tokens_s",
    }.items()
    for name in names.split()
}

# Names of instructions in torch, Megatron-LM and DeepSpeed, in lower case -> schedir's names.
OTHER_INSTRUCTION_NAMES: Final = {
    name: new
    for new, names in {
        "F": "f fwd forward forward_pass forward_step",
        "B": "b bwd backward backward_pass backward_step full_backward",
        "I": "i backward_input",
        "W": "w backward_weight",
        "send_act": "send_f send_fwd send_forward send_activation",
        "recv_act": "recv_f recv_fwd recv_forward recv_activation",
        "send_grad": "send_b send_bwd send_backward send_gradient",
        "recv_grad": "recv_b recv_bwd recv_backward recv_gradient",
        "reduce_grads": "reduce_grad allreduce all_reduce reduce_scatter allreduce_grads",
        "reduce_tied": "reduce_tied_grads allreduce_embedding_grads",
        "step": "optimizer_step optim_step opt optimizer",
        "unshard": "all_gather allgather gather_params",
    }.items()
    for name in names.split()
}

# Names of schedules in DeepSpeed, Megatron-LM, PaddlePaddle and papers -> schedir's names.
OTHER_SCHEDULE_NAMES: Final = MappingProxyType(
    {
        "afab": "gpipe", "bfs": "looped_bfs", "dapple": "one_f_one_b", "dfs": "looped_dfs",
        "fill_drain": "gpipe", "fthenb": "gpipe", "hanayo": "wave",
        "pipedream_flush": "one_f_one_b", "virtual_pipeline": "interleaved",
        "vpp": "interleaved", "zero_bubble": "zb_h1",
    }
)  # fmt: skip
