import argparse
import json

import pytest

from schedtrace.engine.vllm_config import options_of, refuse, refuse_setting, suggestion
from schedtrace.errors import UsageError


def as_vllm_does(convert):
    def optional(value):
        return None if value in {"", "None"} else convert(value)

    return optional


def human(value):
    return int(value.removesuffix("k")) * 1000


def vllm_parser():
    """Options of each kind that vLLM has."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", type=str)
    parser.add_argument("--max-num-seqs", type=as_vllm_does(int))
    parser.add_argument("--max-num-batched-tokens", type=human)
    parser.add_argument("--watermark", type=float)
    parser.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction)
    parser.add_argument("--kv-cache-dtype", type=str, choices=["auto", "fp8", "bfloat16"])
    parser.add_argument("--log-level", type=str.upper, choices=["DEBUG", "INFO"])
    parser.add_argument("--max-lora-rank", type=int, choices=[8, 16])
    parser.add_argument("--tensor-parallel-size", "-tp", type=int)
    parser.add_argument("--compilation-config", "-cc", type=json.loads)
    parser.add_argument("--names", nargs="+")
    parser.add_argument("--hf-token", nargs="?", const=True)
    return parser


MEANT = "; did you mean"
OPTIONS = options_of(vllm_parser())


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--model a --max-num-seqs 4",
        "--max_num_seqs=4 --enforce_eager --no-enforce-eager",
        "--max-num-seqs None",
        "--max-num-batched-tokens 16k",
        "--max-num-batched-tokens 1.5k",
        "--watermark 0.5",
        "--watermark -1",
        "--watermark inf",
        "--watermark 1e-3",
        "--kv-cache-dtype fp8",
        "--log-level info",
        "--max-lora-rank 16",
        "--max-lora-rank 016",
        "-tp 2",
        "-cc.mode 3 --compilation-config.pass_config.x=1",
        "-O3 -O 2 -O.level 3",
        "--compilation-config fast",
        "--names a b c --hf-token --model m_x",
        "--hf-token t",
    ],
)
def test_what_vllm_may_accept_is_not_refused(line):
    assert refuse(line.split(), OPTIONS) is None


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--max-num-seqz 4", "unknown option --max-num-seqz; did you mean --max-num-seqs?"),
        ("--max-num-seq 4", "unknown option --max-num-seq; did you mean --max-num-seqs?"),
        ("--max_num_seqz 4", "unknown option --max-num-seqz; did you mean --max-num-seqs?"),
        ("--max-num-seqz=4", "unknown option --max-num-seqz; did you mean --max-num-seqs?"),
        ("--no-enforce-eagre", "unknown option --no-enforce-eagre; did you mean --no-enforce-eager?"),
        ("--enforce-eagre", "unknown option --enforce-eagre; did you mean --enforce-eager?"),
        ("--trails 4", "unknown option --trails; did you mean --trials?"),
        ("--completely-else 4", "unknown option --completely-else"),
        (
            "--max-nums 4 --modle x",
            f"unknown option --max-nums{MEANT} --max-num-seqs?; unknown option --modle{MEANT} --model?",
        ),
        (
            "--compilation-confg.mode 3",
            "unknown option --compilation-confg; did you mean --compilation-config?",
        ),
        ("--enforce-eager true", "unexpected argument true: --enforce-eager takes no value"),
        ("--model a b", "unexpected argument b"),
        ("--max-num-seqs", "--max-num-seqs: expected one argument"),
        ("--max-num-seqs many", "--max-num-seqs: 'many' is not a whole number"),
        ("--max-num-seqs 1.5", "--max-num-seqs: '1.5' is not a whole number"),
        ("--watermark high", "--watermark: 'high' is not a number"),
        ("-tp two", "--tensor-parallel-size/-tp: 'two' is not a whole number"),
        ("--kv-cache-dtype fp9", "--kv-cache-dtype: 'fp9' is none of auto, fp8, bfloat16; did you mean fp8?"),
        ("--kv-cache-dtype x", "--kv-cache-dtype: 'x' is none of auto, fp8, bfloat16"),
    ],
)
def test_a_wrong_argument_is_told_with_what_was_probably_meant(line, says):
    with pytest.raises(UsageError) as raised:
        refuse(line.split(), OPTIONS, own=["--trials"])
    assert str(raised.value) == says


def test_a_message_begins_with_the_place():
    with pytest.raises(UsageError, match=r"^--config a\.yaml: --max-num-seqs: 'many'"):
        refuse(["--max-num-seqs", "many"], OPTIONS, where="--config a.yaml: ")
    with pytest.raises(UsageError, match=r"^--config a\.yaml: unknown option --x"):
        refuse(["--x"], OPTIONS, where="--config a.yaml: ")


def test_a_long_list_of_choices_is_cut():
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--kind", choices=[f"k{number}" for number in range(13)])
    with pytest.raises(UsageError, match=r"is none of k0, .*, k11, \.\.\.$"):
        refuse(["--kind", "zzz"], options_of(parser))


def test_nothing_close_means_no_guess():
    assert suggestion("--zzz", ["--model"]) == ""
    assert suggestion("--MODEL", ["--model"]) == "; did you mean --model?"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", 4),
        ("max_num_seqs", None),
        ("enforce_eager", False),
        ("kv_cache_dtype", "FP8"),
        ("max_num_batched_tokens", "16k"),
        ("watermark", 0.05),
    ],
)
def test_a_setting_that_vllm_may_take_passes(name, value):
    refuse_setting(name, [value], OPTIONS)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("max_num_seqs", "lots", "--set max_num_seqs=lots: 'lots' is not a whole number"),
        ("max_num_seqs", 1.5, "--set max_num_seqs=1.5: '1.5' is not a whole number"),
        ("max_num_seq", 4, f"--set max_num_seq: not an argument of vLLM{MEANT} max_num_seqs?"),
        ("rooter", "vllm", f"--set rooter: not an argument of vLLM{MEANT} router?"),
        ("no_enforce_eager", True, f"--set no_enforce_eager: not an argument of vLLM{MEANT} enforce_eager?"),
        ("enforce_eager", 1, "--set enforce_eager=1: expected true or false"),
        (
            "kv_cache_dtype",
            "fp9",
            f"--set kv_cache_dtype=fp9: 'fp9' is none of auto, fp8, bfloat16{MEANT} fp8?",
        ),
    ],
)
def test_a_setting_that_vllm_would_refuse_is_named_with_its_option(name, value, told):
    with pytest.raises(UsageError) as raised:
        refuse_setting(name, [value], OPTIONS, own=["router"], where="--set ")
    assert str(raised.value) == told
