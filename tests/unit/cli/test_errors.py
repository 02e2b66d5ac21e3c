"""Every bad input: the exit code, one or two lines on stderr that say what and where, nothing on stdout."""

import sys

import pytest

from schedtrace.errors import reason_of
from schedtrace.model.manifest import FILE_NAME
from schedtrace.model.printable import capped
from tests.makers import encoded, header, manifest, run_folder, step, workload, write_trace

pytestmark = pytest.mark.vllm  # commands that look for vLLM before they begin

USAGE, INPUT = 2, 3
VARY, MODEL = "--vary max_num_seqs=4,8", "--model Qwen3-8B --gpu h100"


@pytest.fixture
def bad(tmp_path, monkeypatch):
    """A folder with one of every bad thing; relative paths, so that lines stay short."""
    monkeypatch.chdir(tmp_path)
    run_folder(tmp_path / "good", step(0))
    run_folder(tmp_path / "runs" / "one", step(0))
    run_folder(tmp_path / "runs" / "two", step(0))
    run_folder(tmp_path / "stepless")
    run_folder(tmp_path / "newer", step(0), schema_version=7)
    run_folder(tmp_path / "newer-run", step(0), about=manifest(schema_version=7))
    run_folder(tmp_path / "broken-run", step(0))
    (tmp_path / "broken-run" / FILE_NAME).write_text("{")
    for name, count in (("small", 4), ("large", 9)):
        about = manifest(workload=workload(num_prompts=count))
        run_folder(tmp_path / name, step(0), about=about, model=name)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "failed").mkdir()
    (tmp_path / "failed" / FILE_NAME).write_bytes(encoded(manifest(status="failed", error="no memory")))
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "text.jsonl").write_text("hello\n")
    write_trace(tmp_path / "cut.jsonl", closed=False, tail=encoded(header())[:50])
    (tmp_path / "vllm.log").write_text(
        "Iteration(0): 1 context requests, 5 context tokens, 0 generation requests, 0 generation tokens, "
        "iteration elapsed time: 2.0 ms\n"
    )
    (tmp_path / "tiny.yaml").write_text("model: tiny\n")
    (tmp_path / "list.yaml").write_text("- model\n")
    (tmp_path / "empty.yaml").touch()
    (tmp_path / "bad.yaml").write_text("model: [unclosed\n")
    (tmp_path / "latin.yaml").write_bytes(b"model: \xff\n")
    (tmp_path / "typed.yaml").write_text("model: tiny\ntrials: many\n")
    (tmp_path / "inf.yaml").write_text("model: tiny\nrequest-rate: 1.0e+10\n")
    (tmp_path / "seed.yaml").write_text("model: tiny\nseed: -1\n")
    (tmp_path / "nested.yaml").write_text("model: tiny\nconfig: zero.yaml\n")
    (tmp_path / "zero.yaml").write_text("model: tiny\ninput_len: 0\n")
    (tmp_path / "half.jsonl").write_text('{"prompt": "a", "output_len": 1}\n\n{"prompt": \n')
    (tmp_path / "neither.jsonl").write_text('{"output_len": 1}\n')
    (tmp_path / "both.jsonl").write_text('{"prompt": "a", "input_len": 1, "output_len": 1}\n')
    (tmp_path / "lengthless.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "share.json").write_text('{"conversations": 1}')
    (tmp_path / "nobody.json").write_text("[]")
    return tmp_path


READING = [
    ("analyze gone", INPUT, "gone: no such file or folder"),
    (f"analyze {'a' * 300}", INPUT, "aaa: no such file or folder"),
    ("analyze good gone", INPUT, "gone: no such file or folder"),
    ("analyze nothing", INPUT, "nothing: no traces in it"),
    ("analyze failed", INPUT, "failed: no trace in this run (run failed: no memory)"),
    ("analyze empty.jsonl", INPUT, "empty.jsonl: empty; expected a trace"),
    ("analyze text.jsonl", INPUT, "text.jsonl: not understood; expected a trace of schedtrace"),
    ("analyze cut.jsonl", INPUT, "cut.jsonl:1: cut off in its first line"),
    ("analyze newer", INPUT, "newer/engine-0.jsonl:1: schema version 7"),
    ("analyze newer-run", INPUT, "newer-run/run.json: written by"),
    ("analyze broken-run", INPUT, "broken-run/run.json: not a manifest"),
    ("analyze good --fail-on dire", USAGE, "--fail-on dire: expected info, warning or critical"),
    ("diff good gone", INPUT, "gone: no such file or folder"),
    ("diff good runs", INPUT, "runs: 2 runs in it; name one of them, such as runs/one"),
    ("diff stepless good", INPUT, "stepless: no step in it to compare"),
    ("analyze good --only blocked", USAGE, "--only blocked: no such finding; there are never-fits, "),
    ("analyze good --from soon", USAGE, "--from soon: expected a time such as 90s, 5m or 1h"),
    ("analyze good --to -1s", USAGE, "--to -1s: expected a time such as 90s, 5m or 1h"),
    ("analyze good --from 1s --last 1s", USAGE, "--from and --last cannot be given together"),
    ("analyze good --objective latency", USAGE, "--objective is about the replays of --predict: give both"),
    ("step good 7", USAGE, "step 7: good has the steps 0 to 0"),
    ("step good 0 --engine 3", USAGE, "--engine 3: good has engine 0"),
    ("step runs 0", USAGE, "runs: 2 runs in it; name one of them, such as runs/one"),
    ("step vllm.log 0", USAGE, "does not record when steps began and ended, which step needs"),
    ("request vllm.log 0", USAGE, "does not record what each request got, which request needs"),
    (
        "request good nobody",
        USAGE,
        "nobody: no request of good matches; it has 0 requests, none at all",
    ),
    ("request gone a", INPUT, "gone: no such file or folder"),
    ("report good good good", USAGE, "give one run, or two without --from, --to and --last"),
    ("export vllm.log --to chrome", USAGE, "not record when steps began and ended, which a viewer needs"),
    (
        "export vllm.log --to perfetto",
        USAGE,
        "not record when steps began and ended, which a viewer needs",
    ),
    ("export vllm.log --to jsonl", USAGE, "expands traces of schedtrace, and this is a vLLM's log"),
    ("diff a.yaml b.yaml", USAGE, "these are configurations, not runs: add --run to run and compare them"),
    ("diff small large", INPUT, "nothing in common to compare"),
]
SWEEPING = [
    ("random", USAGE, "nothing to vary: give --vary NAME=V1,V2"),
    (f"random {VARY} {VARY}", USAGE, "--vary: a setting is varied twice"),
    (f"random {VARY} --set block_size=16,32", USAGE, "--set block_size=16,32: one value"),
    (f"random {VARY} --slo fast", USAGE, "--slo fast: expected bounds such as"),
    (f"random {VARY}", USAGE, "random: not a recorded run, so the engine is unknown: give --model and --gpu"),
    (f"random {VARY} --model Qwen3-8B", USAGE, "--model and --gpu go together"),
    (f"random {VARY} {MODEL} --speedup 2", USAGE, "--speedup does not go with random"),
    (f"random {VARY} {MODEL} --concurrency 2", USAGE, "--concurrency: random is not a recorded run"),
    (f"random {VARY} --model Qwen3-8B --gpu h1", USAGE, "unknown GPU 'h1'"),
    (
        f"good {VARY} --num-prompts 4",
        USAGE,
        "--num-prompts: the load is recorded in good; it is replayed",
    ),
    (f"gone {VARY}", INPUT, "gone: no such file or folder"),
]
RUNNING = [
    ("run", USAGE, "no model given: --model"),
    ("run --max-num-seqs 4", USAGE, "no model given: --model"),
    ("run --config gone.yaml", INPUT, "--config gone.yaml: No such file"),
    ("run --config list.yaml", USAGE, "list.yaml: expected a mapping of options"),
    ("run --config empty.yaml", USAGE, "empty.yaml: expected a mapping of options"),
    ("run --config bad.yaml", USAGE, "--config bad.yaml: not YAML"),
    ("run --config latin.yaml", USAGE, "--config latin.yaml: not YAML"),
    ("run --config inf.yaml", USAGE, "request-rate"),
    ("run --config zero.yaml", USAGE, "input-len"),
    ("run --config seed.yaml", USAGE, "seed"),
    ("run --config nested.yaml", USAGE, "--config nested.yaml: config: one file cannot name another"),
    ("run --model tiny --prequeue --request-rate 5", USAGE, "it cannot go with --request-rate"),
    ("run --model tiny --dataset prompts.csv", INPUT, "--dataset prompts.csv: no such file; expected"),
    ("run --model tiny --dataset gone.jsonl", INPUT, "--dataset gone.jsonl: no such file"),
    ("run --model tiny --dataset empty.jsonl", INPUT, "empty.jsonl: empty; expected Mooncake"),
    ("run --model tiny --dataset half.jsonl", INPUT, "half.jsonl:3: "),
    ("run --model tiny --dataset neither.jsonl", INPUT, "neither.jsonl:1: give either prompt"),
    ("run --model tiny --dataset both.jsonl", INPUT, "both.jsonl:1: give either prompt"),
    ("run --model tiny --dataset lengthless.jsonl", USAGE, "give --output-len"),
    ("run --model tiny --dataset share.json", INPUT, "share.json: not a ShareGPT file"),
    ("run --model tiny --dataset nobody.json", INPUT, "nobody.json: no usable prompt"),
    ("run --model tiny --output . --label ..", USAGE, "--label .."),
    ("run --model tiny --output . --label good", USAGE, "good exists: give another --label"),
    ("run --model tiny --output . --label runs --force", USAGE, "runs is no run folder"),
    ("run --model tiny --output . --label list.yaml", USAGE, "list.yaml is no folder"),
    ("diff --run gone.yaml empty.yaml", INPUT, "--config gone.yaml: No such file"),
    ("diff --run typed.yaml typed.yaml", USAGE, "trials"),
    ("diff --run tiny.yaml tiny.yaml --fail-on regression:speed", USAGE, "no metric speed that can be worse"),
]
TYPED = [
    ("bogus", "'bogus'"),
    ("analyze", "'paths'"),
    ("analyze good --format xml", "'--format'"),
    ("analyze --bogus good", "--bogus"),
    ("diff good", "'new'"),
    ("run --trials 0", "'--trials'"),
    ("run --lines short", "'--lines'"),
    ("run --seed -1", "'--seed'"),
    ("run --seed 4294967296", "'--seed'"),
    ("run --trails 3 --input-len 0", "'--input-len'"),
]
REFUSED = [
    *READING,
    *((f"sweep {words}", code, says) for words, code, says in SWEEPING),
    *RUNNING,
    *((line, USAGE, says) for line, says in TYPED),
]


@pytest.mark.parametrize(("line", "code", "says"), REFUSED)
@pytest.mark.usefixtures("bad")
def test_a_bad_input_is_told_in_one_or_two_lines_and_starts_nothing(cli, plans, line, code, says):
    told, out, err = cli(*line.split())
    assert (told, out, plans) == (code, "", [])
    assert err.startswith("schedtrace: ")
    assert says in err
    assert 1 <= len(err.splitlines()) <= 2


@pytest.mark.parametrize(
    "line",
    [
        "run --model tiny --output logs",
        "sweep random --vary max_num_seqs=4 --model Qwen3-8B --gpu h100",
        "replay good",
        "analyze good --predict",
    ],
)
@pytest.mark.usefixtures("bad")
def test_without_vllm_it_says_what_to_install(cli, tmp_path, monkeypatch, line):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    code, _, err = cli(*line.split())
    assert code == USAGE
    assert err.startswith("schedtrace: vLLM is not installed here: pip install 'schedtrace[vllm]'")
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("line", "package", "says"),
    [
        (
            "watch good",
            "schedtrace.watch.app",
            (
                "the full screen of watch needs an extra: pip install 'schedtrace[watch]'; "
                "watch --once prints text without it"
            ),
        ),
        (
            "export good --to perfetto",
            "schedtrace.export.perfetto",
            (
                "--to perfetto needs an extra: pip install 'schedtrace[perfetto]'; "
                "--to chrome opens in the same viewer"
            ),
        ),
        ("fleet runs --on ray", "ray", "--on ray needs an extra: pip install 'schedtrace[ray]'"),
        ("fleet s3://bucket", "fsspec", "s3://bucket needs an extra: pip install 'schedtrace[s3]'"),
    ],
    ids=["watch", "perfetto", "ray", "s3"],
)
@pytest.mark.usefixtures("bad")
def test_a_command_that_lacks_an_extra_says_so_in_one_line(cli, monkeypatch, line, package, says):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("schedtrace.cli.watch.is_terminal", lambda: True)
    assert cli(*line.split()) == (USAGE, "", f"schedtrace: {says}\n")


LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    "command",
    [
        f"request good {LONG}",
        f"step good {LONG}",
        f"step {LONG} 0",
        f"analyze {LONG}",
        f"analyze good --only {LONG}",
        f"analyze good --last {LONG}",
        f"analyze good --fail-on {LONG}",
        f"analyze good --format {LONG}",
        f"analyze good --{LONG}",
        f"findings {LONG}",
        f"diff good {LONG}",
        f"diff good good --fail-on {LONG}",
        f"export good --to {LONG}",
        f"export good --output {LONG}",
        f"replay good --set {LONG}",
        f"replay good --set {LONG}=1",
        f"replay good --step-times {LONG}",
        f"sweep good --vary {LONG}",
        f"run --model tiny --label {LONG}",
        f"run --config {LONG}",
        f"simulate --model {LONG} --gpu h100",
        f"watch {LONG} --once",
        f"report {LONG}",
        f"advise {LONG}",
        LONG,
    ],
    ids=lambda command: command.replace(LONG, "LONG"),
)
@pytest.mark.usefixtures("bad")
def test_what_was_given_is_quoted_in_short(cli, command):
    code, out, err = cli(*command.split(" "))
    assert code in {USAGE, INPUT}
    assert len(out) + len(err) < 5_000
    assert "x" * 1001 not in out + err


def test_a_long_id_is_quoted_as_ids_are_written(cli, bad):
    _, _, err = cli("request", bad / "good", "y" * 1_000_000)
    assert err.startswith(f"schedtrace: request {capped('y' * 1_000_000)}: no request of ")


class RefusedError(ValueError):
    """As pydantic's."""

    def errors(self):
        return [
            {"loc": ("max_num_seqs",), "msg": "Input should be a valid integer"},
            {"loc": (), "msg": "Value error, the budget is smaller than the batch"},
        ]


def test_what_vllm_refuses_is_told_whole_and_in_one_line():
    told = "max_num_seqs: Input should be a valid integer; the budget is smaller than the batch"
    assert reason_of(RefusedError("2 validation errors for SchedulerConfig\nmax_num_seqs\n ...")) == told
    assert reason_of(ValueError("one\n  and two")) == "one and two"
    assert reason_of(ValueError()) == "ValueError"
