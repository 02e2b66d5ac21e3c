"""What ``sweep`` refuses before it replays anything; ``tests/contract/test_sweep.py`` replays."""

from pathlib import Path

import pytest

from schedtrace.engine.vllm_config import Option
from schedtrace.errors import ExitCode
from tests import makers
from tests.unit.whatif.conftest import a_fit

VARY = ["--vary", "max_num_seqs=4,8"]
MODEL = ["--model", "Qwen3-8B", "--gpu", "h100"]


@pytest.fixture(autouse=True)
def _in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("schedtrace.cli.sweep.require_vllm", lambda: None)


@pytest.fixture
def known(monkeypatch):
    """vLLM's options are in the cache."""
    options = [
        Option(names=["--max-num-seqs"], refuses=["word", "decimal"]),
        Option(names=["--gpu-memory-utilization"], refuses=["word"]),
    ]
    monkeypatch.setattr("schedtrace.engine.vllm_config.read_options", lambda: options)


@pytest.fixture
def asked(monkeypatch):
    """What would have been replayed."""
    calls = []

    def sweep(work, changes, log, _make_pool, **told):
        calls.append((work, changes, log, told))
        raise KeyboardInterrupt

    monkeypatch.setattr("schedtrace.whatif.sweep.replay_configurations", sweep)
    return calls


def test_random_prompts_on_a_model(cli, asked):
    code, _, err = cli(
        "sweep", "random", *VARY, *MODEL, "--num-prompts", 3, "--input-len", 50, "--set", "block_size=32"
    )
    [(work, changes, log, told)] = asked
    assert changes == [{"block_size": 32, "max_num_seqs": 4}, {"block_size": 32, "max_num_seqs": 8}]
    assert [(request.prompt_tokens, request.output_tokens) for request in work.loads[0]] == [(50, 128)] * 3
    assert (told["label"], log.path) == ("random", Path("logs/sweep-random/sweep.jsonl"))
    assert code == ExitCode.INTERRUPTED
    assert err == (
        "schedtrace: interrupted; 0 configurations are in logs/sweep-random/sweep.jsonl, the same command "
        "continues from there\n"
    )


def test_a_workload_file(cli, asked, tmp_path):
    (tmp_path / "load.jsonl").write_text('{"timestamp": 0, "input_length": 30, "output_length": 20}\n')
    cli("sweep", "load.jsonl", *VARY, *MODEL, "--output-len", 7, "--out", "kept")
    [(work, _, log, told)] = asked
    assert [(request.prompt_tokens, request.output_tokens) for request in work.loads[0]] == [(30, 7)]
    assert (told["label"], str(log.path)) == ("load.jsonl", "kept/sweep.jsonl")


def test_a_recorded_load_on_another_model(cli, asked, quiet, monkeypatch):
    folder = makers.run_folder(
        quiet.parent / "seen",
        makers.step(0, got={"a": 10}, new="a", arrived=[makers.arrival("a", 0)]),
        makers.step(1, got={"a": 1}, finished=[makers.finish("a")]),
    )
    saved = a_fit()
    monkeypatch.setattr("schedtrace.step_times.fitted.load_fit", lambda _: saved)
    cli("sweep", folder, *VARY, *MODEL)
    cli("sweep", folder / "engine-0.jsonl", *VARY, "--step-times", "saved.json")
    [(on_model, *_), (as_recorded, *_)] = asked
    assert on_model.engine.shape.name == "Qwen3-8B"
    assert (as_recorded.engine.header.model, as_recorded.engine.times) == ("tiny", saved)
    assert [load.requests for load in (*on_model.loads, *as_recorded.loads)] == [1, 1]


MEMORY = "it acts through the GPU's memory, which a replay does not have: --set num_gpu_blocks_override=N"
UNKNOWN = "--set max_num_seq: not an argument of vLLM; did you mean max_num_seqs?"


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("command", "given", "why"),
    [
        ("replay", "--set max_num_seqs=lots", "--set max_num_seqs=lots: 'lots' is not a whole number"),
        ("replay", "--set max-num-seq=4", UNKNOWN),
        ("replay", "--set gpu-memory-utilization=0.5", f"--set gpu_memory_utilization: {MEMORY}"),
        ("replay", "--set router=x", "--set router=x: one of vllm, round-robin, least-running, least-tokens"),
        ("sweep", "--vary max_num_seqs=4,lots", "--vary max_num_seqs=lots: 'lots' is not a whole number"),
        ("sweep", "--vary balance_ranks=1,2", "--vary balance_ranks=2: one of true, false"),
        ("sweep", "--vary max_num_seqs=4,8 --set max_num_seq=1", UNKNOWN),
        ("sweep", "--vary gpu_memory_utilization=0.5", f"--vary gpu_memory_utilization: {MEMORY}"),
    ],
)
def test_a_wrong_setting_is_refused_before_vllm_is_imported(cli, quiet, monkeypatch, command, given, why):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: pytest.fail("vLLM is looked for"))
    code, out, err = cli(command, quiet, *given.split())
    assert (code, out, err) == (ExitCode.USAGE, "", f"schedtrace: {why}\n")


@pytest.mark.usefixtures("known")
def test_a_models_memory_may_be_swept(cli, asked):
    cli("sweep", "random", "--vary", "gpu_memory_utilization=0.5,0.8", *MODEL)
    assert asked


def test_a_wrong_option_of_simulate_is_refused_before_vllm_is_imported(cli, monkeypatch):
    options = [Option(names=["--max-num-seqs"], refuses=["word", "decimal"])]
    monkeypatch.setattr("schedtrace.engine.plan.read_options", lambda: options)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: pytest.fail("vLLM is looked for"))
    code, out, err = cli("simulate", *MODEL, "--max-num-seqs", "lots")
    assert (code, out, err) == (
        ExitCode.USAGE,
        "",
        "schedtrace: --max-num-seqs: 'lots' is not a whole number\n",
    )
