"""An engine in this process with a KV cache too small for its prompts: ``python preempting.py MODEL``.

Prints vLLM's own counter of preemptions.
"""

import json
import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    """Generate, and print the counter."""
    engine = LLM(
        model,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        kv_cache_memory_bytes=64 << 20,
        num_gpu_blocks_override=24,
        disable_log_stats=False,
    )
    prompts = [{"prompt_token_ids": [7 * i + j % 1000 for j in range(500)]} for i in range(12)]
    sampling = SamplingParams(max_tokens=150, ignore_eos=True, detokenize=False)
    engine.generate(prompts, sampling, use_tqdm=False)
    counters = {metric.name: metric for metric in engine.get_metrics()}
    print(json.dumps({"vllm:num_preemptions": counters["vllm:num_preemptions"].value}))


if __name__ == "__main__":
    main(*sys.argv[1:])
