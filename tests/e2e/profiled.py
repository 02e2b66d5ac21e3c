"""An engine that torch profiles: ``python profiled.py MODEL FOLDER``. The profile is written to the folder.

All in one process, which starts fastest. The first prompts warm up; the profile has the steps of the second.
"""

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
        max_model_len=512,
        kv_cache_memory_bytes=16 << 20,
        profiler_config=profiler,
    )
    prompts = [{"prompt_token_ids": [7 + number] * 64} for number in range(4)]
    sampling = SamplingParams(max_tokens=12, detokenize=False, ignore_eos=True)
    engine.generate(prompts, sampling, use_tqdm=False)
    engine.start_profile()
    engine.generate(prompts, sampling, use_tqdm=False)
    engine.stop_profile()


if __name__ == "__main__":
    main(*sys.argv[1:])
