"""Advice that a contract test has tried: vLLM's scheduler was driven with it, and the wait got shorter.

``tests/exam/test_advice.py`` fails if this table and what it tries differ in either direction.
"""

PROVEN: frozenset[tuple[str, str | None, str]] = frozenset(
    {
        ("head-of-line", "kv_blocks", "num_gpu_blocks_override"),
        ("kv-bound", "kv_blocks", "num_gpu_blocks_override"),
        ("kv-bound", "kv_blocks", "watermark"),
        ("max-num-seqs-bound", "max_num_seqs", "max_num_active_seqs"),
        ("max-num-seqs-bound", "max_num_seqs", "max_num_seqs"),
        ("never-fits", "kv_blocks", "max_model_len"),
        ("never-fits", "kv_blocks", "num_gpu_blocks_override"),
        ("no-progress", "kv_blocks", "max_num_seqs"),
        ("no-progress", "kv_blocks", "scheduler_reserve_full_isl"),
        ("other-limit", "chunked_prefill_off", "enable_chunked_prefill"),
        ("other-limit", "encoder_budget", "max_num_batched_tokens"),
        ("other-limit", "lora_cap", "max_loras"),
        ("other-limit", "mamba_alignment", "max_num_batched_tokens"),
        ("parked-loads", "remote_kv_pending", "num_gpu_blocks_override"),
        ("pipeline-bubbles", None, "max_num_batched_tokens"),
        ("priority-inversion", "max_num_seqs", "max_num_seqs"),
        ("scheduler-overhead", None, "async_scheduling"),
        ("slow-steps", None, "max_num_seqs"),
        ("token-budget-bound", "token_budget", "max_num_batched_tokens"),
    }
)
"""Code and cause of the finding, and the setting."""
