"""An engine in this process: ``python in_process.py MODEL FOLDER``.

First its KV cache is too small for its prompts, and it prints vLLM's own counter of preemptions. Then torch
profiles short prompts, which fit; the profile is written to the folder.
"""

import json
import sys

from vllm import LLM, SamplingParams


def main(model: str, folder: str) -> None:
    """Generate twice, the second time with the profiler on."""
    profiler = {"profiler": "torch", "torch_profiler_dir": folder, "torch_profiler_with_stack": False}
    engine = LLM(
        model,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        kv_cache_memory_bytes=64 << 20,
        num_gpu_blocks_override=24,
        disable_log_stats=False,
        profiler_config=profiler,
    )
    large = [{"prompt_token_ids": [7 * i + j % 1000 for j in range(500)]} for i in range(12)]
    small = [{"prompt_token_ids": [7 + number] * 64} for number in range(4)]
    tokens = {"ignore_eos": True, "detokenize": False}
    engine.generate(large, SamplingParams(max_tokens=150, **tokens), use_tqdm=False)
    counters = {metric.name: metric for metric in engine.get_metrics()}
    print(json.dumps({"vllm:num_preemptions": counters["vllm:num_preemptions"].value}))
    engine.start_profile()
    engine.generate(small, SamplingParams(max_tokens=12, **tokens), use_tqdm=False)
    engine.stop_profile()


if __name__ == "__main__":
    main(*sys.argv[1:])
