"""The commands, in this process."""

import json
import re

import pytest

pytest.importorskip("vllm")

from schedtrace.cli.main import main
from schedtrace.read.run import read_run
from schedtrace.whatif.prediction import predict
from tests.contract.whatif.conftest import Here

pytestmark = pytest.mark.vllm


@pytest.fixture
def run(seats):
    """A load that waits for seats."""
    return seats.run.path


def test_replay(run, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(predict.__kwdefaults__, "resamples", 1)
    saved = tmp_path / "times.json"
    assert main(["replay", str(run), "--save-step-times", str(saved)]) == 0
    capsys.readouterr()
    assert main(["replay", str(run), "--step-times", str(saved), "--set", "max-num-seqs=16"]) == 0
    assert "with max_num_seqs 4 -> 16" in capsys.readouterr().out
    assert main(["replay", str(run), "--step-times", str(saved), "--format", "json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    baseline = checked["baseline"]
    assert baseline["same_steps"] == baseline["compared_steps"] > 100
    [configuration] = checked["configurations"]
    assert configuration["recorded"]


def test_analyze_predict(run, capsys, monkeypatch):
    monkeypatch.setattr("schedtrace.whatif.advice.RESAMPLES", 1)
    monkeypatch.setattr("schedtrace.whatif.advice.menu", lambda *_: [("max_num_seqs", 16)])
    assert main(["analyze", str(run), "--predict"]) == 0
    assert "Replayed on this load: " in " ".join(capsys.readouterr().out.split())


def test_a_simulation_of_a_gpu_is_a_run_like_any_other(tmp_path, capsys):
    given = ["simulate", "--model", "Qwen3-8B", "--gpu", "h100", "--num-prompts", "40", "--output-len", "30"]
    given += ["--request-rate", "40", "--max-num-seqs", "4", "--output", str(tmp_path), "--label", "gpu"]
    assert main(given) == 0
    told = capsys.readouterr().out
    assert "budget 8,192, 4 seats" in told
    assert re.search(r"simulated [\d.]+ s in [\d.]+ s; recorded to ", told)
    assert main(["analyze", str(tmp_path / "gpu"), "--format", "json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["runs"]
    assert one["findings"][0]["code"] == "max-num-seqs-bound"
    assert one["config"]["status"] == "finished"


@pytest.mark.parametrize("given", [[], ["--max-model-len", "auto"]])
def test_a_model_longer_than_the_cache_is_cut_to_it(given, tmp_path, capsys):
    """Qwen3-32B has 40,960 positions; an H100 has 2,452 blocks left for it."""
    load = ["--num-prompts", "2", "--input-len", "16", "--output-len", "2", "--label", "fit"]
    asked = ["simulate", "--model", "Qwen3-32B", "--gpu", "h100", *load, *given, "--output", str(tmp_path)]
    assert main(asked) == 0
    told = "max-model-len 39,232: all that the KV cache holds, as with vLLM's --max-model-len auto\n"
    assert told in capsys.readouterr().out
    [trace] = read_run(tmp_path / "fit").traces
    assert (trace.header.max_model_len, trace.header.kv_blocks_total) == (39_232, 2452)


def test_a_sweep_says_where_the_cache_decides_the_longest_request(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("schedtrace.whatif.sweep.local_replays", lambda work, _: Here(work))
    load = ["--num-prompts", "2", "--input-len", "16", "--output-len", "2"]
    asked = ["sweep", "random", *load, "--model", "Qwen3-32B", "--gpu", "h100", "--jobs", "1"]
    assert main([*asked, "--vary", "tensor_parallel_size=1,2"]) == 0
    told = "In 1 configuration max_model_len is all that the KV cache holds"
    why = "as with vLLM's --max-model-len auto: 39,232 tokens or more."
    assert f"{told}, {why}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--gpu", "h1000"], "h1000"),
        (["--gpu", "h100", "--max-num-seq", "4"], "--max-num-seq"),
        (["--gpu", "h100", "--max-model-len", "100000"], "the largest that fits is 39,232"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(arguments, told, capsys, tmp_path):
    given = ["simulate", "--model", "Qwen3-32B", *arguments, "--num-prompts", "2", "--output", str(tmp_path)]
    assert main(given) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert told in line
