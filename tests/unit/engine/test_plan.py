import errno
import json
import os
from pathlib import Path

import pytest

from schedtrace.engine import plan
from schedtrace.engine.plan import (
    Plan,
    both_fit,
    check_lengths,
    check_run,
    folder_of,
    make_folders,
    own_limit,
)
from schedtrace.engine.prompts import load_prompts
from schedtrace.engine.run_spec import RunSpec
from schedtrace.errors import RecordingError, SchedtraceError, UsageError
from schedtrace.model.manifest import read_manifest
from tests.makers import run_folder, step

pytestmark = pytest.mark.vllm  # commands that look for vLLM before they begin


def spec(*engine_args, **fields):
    return RunSpec(engine_args=["--model", "tiny", *engine_args], **fields)


def test_a_plan_begins_as_a_manifest_of_its_own(tmp_path):
    plan = Plan(spec(trials=3), tmp_path, "x", ["schedtrace", "run"])
    plan.save_manifest("failed", "no memory")
    told = read_manifest(tmp_path)
    assert (told.status, told.error, told.label) == ("failed", "no memory", "x")
    assert (told.command, told.trials_asked, told.trials) == (["schedtrace", "run"], 3, [])


def test_a_manifest_that_cannot_be_written_is_one_line_and_leaves_no_part(tmp_path):
    plan = Plan(spec(), tmp_path / "gone", "x", [])
    with pytest.raises(RecordingError) as raised:
        plan.save_manifest("running")
    assert str(raised.value) == f"{tmp_path / 'gone'}: run.json cannot be written (No such file or directory)"
    assert raised.value.exit_code == 4


def test_a_full_disk_keeps_the_manifest_that_was_there(tmp_path, monkeypatch):
    plan = Plan(spec(), tmp_path, "x", [])
    plan.save_manifest("running")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(RecordingError, match="No space left on device"):
        plan.save_manifest("finished")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert read_manifest(tmp_path).status == "running"


def test_a_plan_keeps_no_secret_of_its_command(tmp_path):
    plan = Plan(spec(), tmp_path, "x", ["schedtrace", "run", "--hf-token", "hf_x", "--api-key=y"])
    assert plan.manifest.command == ["schedtrace", "run", "--hf-token", "(hidden)", "--api-key=(hidden)"]


def test_a_sound_spec_passes_the_check():
    assert check_run(spec(prequeue=True)) == []
    assert check_run(spec(request_rate=5.0)) == []


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (RunSpec(engine_args=["--seed", "0"]), "no model given"),
        (spec(prequeue=True, request_rate=5.0), "--prequeue"),
        (spec(dataset="x.csv"), "x.csv"),
        (spec(dataset="gone.jsonl"), "gone.jsonl"),
    ],
)
def test_what_cannot_work_is_found_before_anything_is_started(run, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SchedtraceError, match=says):
        check_run(run)


@pytest.mark.parametrize(
    ("shares", "fit"),
    [
        ([[], []], False),
        ([["--gpu-memory-utilization", "0.4"], ["--gpu-memory-utilization=0.5"]], True),
        ([["--gpu-memory-utilization", "0.4"], []], False),
        ([["--gpu-memory-utilization", "0.9"], ["--gpu-memory-utilization", "0.05"]], True),
        ([["--gpu-memory-utilization", "0.9"], ["--gpu-memory-utilization", "0.0501"]], False),
        ([["--gpu_memory_utilization", "0.4"], ["--gpu-memory-utilization", "0.6"]], False),
        ([["--gpu-memory-utilization", "half"], ["--gpu-memory-utilization", "0.04"]], False),
    ],
)
def test_on_a_gpu_both_engines_fit_if_their_shares_do(tmp_path, monkeypatch, shares, fit):
    plans = [Plan(spec(*arguments), tmp_path, "x", []) for arguments in shares]
    monkeypatch.setattr(plan, "is_cpu_build", lambda: False)
    assert both_fit(plans) is fit
    monkeypatch.setattr(plan, "is_cpu_build", lambda: True)
    assert both_fit(plans) is True


def make_folder(output, name, *, force):
    folder = folder_of(output, name)
    make_folders([folder], force=force)
    return folder


@pytest.mark.parametrize(
    ("label", "name"),
    [("a b/c", "a_b_c"), ("x=1,y=2", "x=1_y=2"), ("v1.2+k-_", "v1.2+k-_"), ("ü", "ü"), ("a\0b", "a_b")],
)
def test_a_label_becomes_one_new_folder_or_one_that_is_empty(tmp_path, label, name):
    for _ in range(2):
        folder = make_folder(tmp_path / "a" / "b", label, force=False)
        assert (folder, folder.is_dir()) == (tmp_path / "a" / "b" / name, True)


def test_a_folder_with_something_in_it_is_refused_without_force(tmp_path):
    run_folder(tmp_path / "run", step(0))
    with pytest.raises(UsageError, match=r"run exists: .*--force"):
        make_folder(tmp_path, "run", force=False)
    assert (tmp_path / "run" / "engine-0.jsonl").exists()


@pytest.mark.parametrize("name", ["engine-0.jsonl", "run.json"])
def test_force_empties_a_run_folder_whether_or_not_it_recorded(tmp_path, name):
    (tmp_path / "run").mkdir()
    for file in (name, "vllm.log"):
        (tmp_path / "run" / file).touch()
    assert list(make_folder(tmp_path, "run", force=True).iterdir()) == []


@pytest.mark.parametrize("name", ["thesis.tex", "engine.jsonl", "run.json.bak", "one/engine-0.jsonl"])
def test_force_never_empties_a_folder_that_is_no_run(tmp_path, name):
    (tmp_path / "run" / name).parent.mkdir(parents=True)
    (tmp_path / "run" / name).write_text("precious")
    with pytest.raises(UsageError, match="run is no run folder"):
        make_folder(tmp_path, "run", force=True)
    assert (tmp_path / "run" / name).read_text() == "precious"


@pytest.mark.parametrize("force", [True, False])
def test_a_file_or_a_link_of_that_name_is_no_folder(tmp_path, force):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(run_folder(tmp_path / "real", step(0)))
    for name in ("file", "link"):
        with pytest.raises(UsageError, match=f"{name} is no folder"):
            make_folder(tmp_path, name, force=force)
    assert (tmp_path / "real" / "engine-0.jsonl").exists()


def test_no_folder_is_touched_if_one_of_them_cannot_be_made(tmp_path):
    run_folder(tmp_path / "old", step(0))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file is no folder"):
        make_folders([tmp_path / "new", tmp_path / "old", tmp_path / "file"], force=True)
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "old" / "engine-0.jsonl").exists()


def denied(*_):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.mark.parametrize(
    ("name", "patched", "says"),
    [
        ("file/run", {}, "cannot be made"),
        ("a" * 300, {}, r"cannot be made \(File name too long\)"),
        ("run", {"os.access": lambda *_: False}, "run: cannot be written to; give another --output"),
        ("run", {"Path.exists": denied}, r"run: cannot be made \(Permission denied\)"),
    ],
)
def test_a_folder_that_cannot_be_made_or_used_is_told(tmp_path, monkeypatch, name, patched, says):
    (tmp_path / "file").touch()
    for function, replaced in patched.items():
        monkeypatch.setattr(f"schedtrace.engine.plan.{function}", replaced)
    with pytest.raises(UsageError, match=says):
        make_folders([tmp_path / name], force=False)


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
