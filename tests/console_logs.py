"""Lines of vLLM's console log, for tests."""


def clock(at_s):
    """``05-19 10:00:00`` and so many seconds later."""
    minutes, seconds = divmod(at_s, 60)
    hours, minutes = divmod(minutes, 60)
    return f"05-{19 + (10 + hours) // 24:02} {(10 + hours) % 24:02}:{minutes:02}:{seconds:02}"


def periodic(
    at_s=0,
    *,
    running=4,
    waiting=0,
    kv=20.0,
    prompt=0.0,
    output=100.0,
    engine="Engine 000: ",
    more="",
    tail="",
):
    """A periodic line of a recent release, without a line break."""
    return (
        f"(APIServer pid=1) INFO {clock(at_s)} [loggers.py:271] {engine}Avg prompt throughput: {prompt:.1f} "
        f"tokens/s, Avg generation throughput: {output:.1f} tokens/s, Running: {running} reqs, "
        f"Waiting: {waiting} reqs, {more}GPU KV cache usage: {kv:.1f}%, Prefix cache hit rate: 0.0%{tail}"
    )


def every_10_s(*lines, **shared):
    """A text of periodic lines, 10 s apart."""
    return "".join(periodic(10 * place, **shared | line) + "\n" for place, line in enumerate(lines))


def message(level, text, place="core.py:96", at_s=0):
    return f"(EngineCore pid=7) {level} {clock(at_s)} [{place}] {text}\n"


START = (
    message("INFO", "vLLM API server version 0.11.0", "api_server.py:1839")
    + message(
        "INFO",
        "non-default args: {'model_tag': 'm', 'api_key': ['sk-1'], 'model': 'Qwen/Qwen3-8B', "
        "'max_num_seqs': 64, 'max_model_len': 8192}",
        "utils.py:233",
    )
    + message("INFO", "Chunked prefill is enabled with max_num_batched_tokens=2048.", "scheduler.py:225")
    + message(
        "INFO",
        "Initializing a V1 LLM engine (v0.11.0) with config: model='Qwen/Qwen3-8B', speculative_config=None, "
        "max_seq_len=8192",
    )
    + message("INFO", "GPU KV cache size: 400,448 tokens", "kv_cache_utils.py:1087")
    + message("INFO", "Maximum concurrency for 8,192 tokens per request: 48.88x", "kv_cache_utils.py:1091")
)
"""Lines with which vLLM 0.11 starts."""
