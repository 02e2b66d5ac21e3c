"""A shape's figures, from the table and from a config.json, and what a GPU does."""

import json
import subprocess
import sys

import pytest

from schedtrace.errors import InputError, UsageError
from schedtrace.step_times.roofline import gpu
from schedtrace.step_times.shapes import SHAPES, shape

TINY = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "intermediate_size": 16,
    "vocab_size": 100,
}


@pytest.fixture
def read(tmp_path):
    def read(**fields):
        folder = tmp_path / "tiny"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**TINY, **fields}))
        return shape(str(folder))

    return read


@pytest.mark.parametrize(
    ("name", "published", "active"),
    [
        ("Qwen3-8B", 8_190_735_360, 6_945_767_424),
        ("Qwen3-32B", 32_762_123_264, 31_205_621_760),
        ("Llama-3.1-8B", 8_030_261_248, 6_979_321_856),
        ("Llama-3.1-70B", 70_553_706_496, 68_451_041_280),
        ("DeepSeek-V3", 671_026_419_200, 35_697_917_952),
    ],
)
def test_parameters_are_the_published_ones_but_norms(name, published, active):
    assert 0.9999 < SHAPES[name].parameters / published <= 1
    assert SHAPES[name].active_parameters == active


def test_parameters_by_hand(read):
    # Attention: q 8*12, k and v 8*6 each, o 12*8; MLP 3*8*16; embeddings 2*100*8.
    assert read().attention_parameters == 96 + 48 + 48 + 96
    assert read().parameters == 2 * (288 + 384) + 1600
    assert read(tie_word_embeddings=True).parameters == 2 * (288 + 384) + 800


def test_parameters_of_experts_by_hand(read):
    with_experts = read(
        n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=5,
        first_k_dense_replace=1,
    )  # fmt: skip
    # One dense layer; one with a router (8*4) and 4 + 1 experts of 3*8*5, of which a token goes through 3.
    assert with_experts.parameters == 2 * 288 + 384 + 32 + 5 * 120 + 1600
    assert with_experts.active_parameters == 2 * 288 + 384 + 32 + 3 * 120


def test_parameters_of_latent_attention_by_hand(read):
    latent = {"kv_lora_rank": 5, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 4}
    # kv down 8*(5+2), kv up 5*4*(3+4), o 4*4*8; q 8*20, or compressed to 6: 6*(8+20).
    assert read(**latent).attention_parameters == 56 + 140 + 128 + 160
    assert read(**latent, q_lora_rank=6).attention_parameters == 56 + 140 + 128 + 168


@pytest.mark.parametrize(
    ("quantization", "weights"),
    [
        (None, "bfloat16"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
    ],
)
def test_weights_are_stored_as_the_quantization_says(read, quantization, weights):
    assert read(quantization_config=quantization).weight_dtype == weights


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["full_attention", "mamba"]}, "layers of mamba are not modelled"),
        ({"sliding_window": 128}, "layers of sliding_attention are not modelled"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            "'hqq' is not modelled: known are fp8",
        ),
    ],
)
def test_what_is_not_modelled_is_refused(read, fields, message):
    with pytest.raises(UsageError, match=message):
        read(**fields)


def test_a_window_that_is_not_used_is_none(read):
    assert read(sliding_window=128, use_sliding_window=False).layers == 2


def test_a_config_without_a_figure_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(InputError, match=r"config.json: lacks 'num_attention_heads'"):
        shape(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match=r"not a model's config.json"):
        shape(str(tmp_path))


@pytest.mark.parametrize("name", ["Qwen3-32B", "Qwen/Qwen3-32B", "qwen3-32b"])
def test_names_of_the_table(name):
    assert shape(name) is SHAPES["Qwen3-32B"]
    assert shape("meta-llama/Llama-3.1-8B-Instruct") is SHAPES["Llama-3.1-8B"]


def test_an_unknown_model_lists_the_known_ones():
    known = r"unknown model 'gpt-9': known are Qwen3-8B, .*, DeepSeek-V3, or name"
    with pytest.raises(UsageError, match=known):
        shape("gpt-9")


@pytest.mark.parametrize("name", ["h100", "H100", "H100-SXM", "NVIDIA H100 80GB HBM3"])
def test_names_of_gpus(name):
    assert gpu(name).name == "H100 SXM"
    assert (gpu(name).bf16_flops, gpu(name).memory_bytes_per_s) == (989e12, 3.35e12)


@pytest.mark.parametrize("name", ["h100 pcie", "gh200", "", "h100 h200"])
def test_an_unknown_gpu_lists_the_known_ones(name):
    with pytest.raises(UsageError, match=r"known are a100, h100, h200, b200"):
        gpu(name)


def test_importing_it_loads_nothing_heavy():
    code = (
        "import sys, schedtrace.step_times.fitted, schedtrace.step_times.roofline;"
        "print({'torch', 'vllm', 'scipy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
