import json

import pytest

from schedtrace.engine.plan import check_lengths, own_limit
from schedtrace.engine.prompts import load_prompts
from schedtrace.engine.run_spec import RunSpec
from schedtrace.errors import UsageError

PLAIN = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
OWN = "max_position_embeddings in m/config.json"
A_TOKEN = 2 * 2 * 2 * 32 * 2
"""Bytes: keys and values, layers, heads, their size, two bytes each."""


@pytest.fixture
def check(tmp_path, monkeypatch):
    """``check("--max-model-len 8k", config, input_len=...)`` on a model folder ``m``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()

    def run(line, config=PLAIN, **workload):
        if config is not None:
            text = config if isinstance(config, str) else json.dumps(config)
            (tmp_path / "m" / "config.json").write_text(text)
        spec = RunSpec(engine_args=["--model", "m", *line.split()], num_prompts=2, **workload)
        check_lengths(spec, load_prompts(spec))

    return run


@pytest.mark.parametrize(
    ("line", "workload", "says"),
    [
        (
            "",
            {"input_len": 4000, "output_len": 97},
            (
                f"a request of 4000 prompt tokens + 97 output tokens exceeds the limit of 4096 ({OWN}): "
                "lower --input-len or --output-len"
            ),
        ),
        (
            "--max_model_len=1k",
            {"input_len": 900, "output_len": 101},
            (
                "a request of 900 prompt tokens + 101 output tokens exceeds the limit of 1000 "
                "(--max-model-len): lower --input-len or --output-len, or raise --max-model-len"
            ),
        ),
        (
            "--max-model-len auto",
            {"input_len": 4096, "output_len": 1},
            (
                f"a request of 4096 prompt tokens + 1 output tokens exceeds the limit of 4096 ({OWN}): "
                "lower --input-len or --output-len"
            ),
        ),
        ("--max-model-len 0", {}, "--max-model-len 0: a length is 1 or more"),
        ("--max-model-len -5", {}, "--max-model-len -5: a length is 1 or more"),
        (
            "--max-model-len 4097",
            {},
            (
                f"--max-model-len 4097 exceeds the model's own 4096 ({OWN}): lower it, or set "
                "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
            ),
        ),
        (
            "--max-num-batched-tokens 4095 --no-enable-chunked-prefill",
            {},
            (
                f"--max-num-batched-tokens 4095 is less than one request of 4096 tokens ({OWN}), and chunked "
                "prefill is off: raise the budget, lower --max-model-len, or drop --no-enable-chunked-prefill"
            ),
        ),
        (
            f"--kv-cache-memory-bytes {4096 * A_TOKEN - 1}",
            {},
            (
                f"--kv-cache-memory-bytes {4096 * A_TOKEN - 1} has room for 4095 tokens, and one request of "
                f"4096 tokens ({OWN}) must fit: raise it above {4096 * A_TOKEN}, or lower --max-model-len "
                "below 4095"
            ),
        ),
        (
            "--num-gpu-blocks-override 4 --block-size 16",
            {"input_len": 40, "output_len": 10},
            (
                "--num-gpu-blocks-override 4 with --block-size 16 has room for 48 tokens, and the longest "
                "request has 50: raise it to 5 or more"
            ),
        ),
    ],
)
def test_an_impossible_length_is_told_with_its_limit_and_what_to_do(check, line, workload, says):
    with pytest.raises(UsageError) as raised:
        check(line, **workload)
    assert str(raised.value) == says


@pytest.mark.parametrize(
    ("line", "workload"),
    [
        ("", {"input_len": 4000, "output_len": 96}),
        ("--max-model-len 1K", {"input_len": 900, "output_len": 124}),
        ("--max-num-batched-tokens 4096 --no-enable-chunked-prefill", {}),
        ("--max-num-batched-tokens 64 --no-enable-chunked-prefill --enable-chunked-prefill", {}),
        ("--max-num-batched-tokens 64", {}),
        ("--max-model-len 4096", {}),
        ("--max-num-batched-tokens 64 --no-enable-chunked-prefill --max-model-len auto", {}),
        (f"--kv-cache-memory-bytes {4096 * A_TOKEN}", {}),
        (f"--kv-cache-memory-bytes {2048 * A_TOKEN} --kv-cache-dtype fp8", {}),
        (f"--kv-cache-memory-bytes {2048 * A_TOKEN} --max-model-len 2048", {}),
        ("--kv-cache-memory-bytes 64 --max-model-len auto", {}),
        ("--kv-cache-memory-bytes 64 -tp 2", {}),
        ("--kv-cache-memory-bytes 64 --kv-cache-dtype nvfp4", {}),
        ("--num-gpu-blocks-override 4 --block-size 16", {"input_len": 40, "output_len": 9}),
        ("--num-gpu-blocks-override 4", {}),
        ("--max-model-len huge", {}),
        ("--hf-overrides.max_position_embeddings 99999", {"input_len": 5000}),
        ("--speculative-config {}", {"input_len": 5000}),
    ],
)
def test_what_may_work_is_left_to_vllm(check, line, workload):
    assert check(line, **workload) is None


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": {"rope_type": "yarn", "factor": 4}},
        {"rope_scaling": {"type": "linear", "factor": 4}},
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4}}},
        {"text_config": {"max_position_embeddings": 1 << 20}},
        {"max_position_embeddings": None},
        {"max_position_embeddings": "4096"},
        {"model_max_length": 1e30},
    ],
)
def test_a_length_that_config_json_alone_does_not_tell_is_left_to_vllm(check, change):
    assert check("", {**PLAIN, **change}, input_len=5000) is None


@pytest.mark.parametrize("config", [None, "", "[]", "{"])
def test_a_model_without_a_readable_config_is_left_to_vllm(check, config):
    assert check("--kv-cache-memory-bytes 1 --num-gpu-blocks-override 2 --block-size 16", config) is None


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"max_position_embeddings": 9, "seq_length": 7}, (7, "seq_length")),
        ({"max_position_embeddings": 9, "seq_length": 7, "model_max_length": 8}, (8, "model_max_length")),
        ({"n_positions": 5, "rope_scaling": {"rope_type": "llama3", "factor": 8}}, (5, "n_positions")),
        ({"n_positions": 5, "quantization_config": {}, "rope_scaling": None}, (5, "n_positions")),
    ],
)
def test_the_models_own_length_is_found_in_vllms_order(config, limit):
    found = own_limit(["--model", "m"], config)
    assert (found.tokens, found.source) == (limit[0], f"{limit[1]} in m/config.json")


def test_a_model_may_be_stretched_on_purpose(check, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert check("--max-model-len 8192", input_len=8000, output_len=192) is None


@pytest.mark.parametrize(
    "change", [{"sliding_window": 64}, {"layer_types": ["sliding_attention"]}, {"model_type": "deepseek_v3"}]
)
def test_a_model_that_does_not_keep_every_token_is_left_to_vllm(check, change):
    line = "--kv-cache-memory-bytes 64 --num-gpu-blocks-override 2 --block-size 16"
    assert check(line, {**PLAIN, **change}) is None


def test_the_longest_request_of_a_data_set_counts(check, tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        '{"input_len": 10, "output_len": 1}\n{"prompt": "hello", "output_len": 4096}\n'
    )
    with pytest.raises(UsageError) as raised:
        check("", dataset="rows.jsonl")
    assert str(raised.value) == (
        "rows.jsonl: a request of a text prompt + 4096 output tokens exceeds the limit of 4096 "
        "(max_position_embeddings in m/config.json): lower the lengths in it, or --output-len"
    )
