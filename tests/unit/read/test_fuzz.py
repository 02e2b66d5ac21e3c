"""Broken runs and records end in a result or in one clear error, in bounded memory.

``tools/bench/fuzz_reader.py`` tries many more.
"""

import contextlib
import io
import json
import random
import tracemalloc
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schedtrace.cli.main import main
from schedtrace.diagnose.records import described
from schedtrace.errors import ExitCode, SchedtraceError
from schedtrace.model.printable import json_of
from schedtrace.model.records import Records
from schedtrace.present.pages.records import records_page
from schedtrace.present.renderers import json as json_renderer
from schedtrace.present.renderers import text
from schedtrace.read.kinds import kind_of
from tests.console_logs import START, every_10_s, periodic
from tests.fuzz import reading
from tests.fuzz.mutate import LOGS, TRACES, case
from tests.seeds import COUNT
from tests.unit.read.test_benchmark_result import AIPERF, RUN

slow = settings(suppress_health_check=[*HealthCheck])


def ends_well(folder, files):
    """``analyze`` says something: a result on stdout, or one error that names the file."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    path = folder if len(files) > 1 else folder / next(iter(files))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["analyze", str(path)])
    for name in files:
        (folder / name).unlink()
    assert code in {ExitCode.OK, ExitCode.INPUT}
    assert "Traceback" not in out.getvalue() + err.getvalue()
    if code == ExitCode.OK:
        assert out.getvalue()
    else:
        assert out.getvalue() == ""
        assert err.getvalue().startswith(f"schedtrace: {path}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@slow
@given(st.randoms(use_true_random=False))
def test_a_mutated_record_ends_in_a_result_or_an_error(folder, random):
    ends_well(folder, case(random))


@slow
@given(
    st.sampled_from(["engine-0.jsonl", "some.log"]),
    st.sampled_from([*LOGS, *TRACES]),
    st.binary(max_size=300),
)
def test_any_bytes_in_and_after_a_record_end_in_a_result_or_an_error(folder, name, source, noise):
    content = source.read_bytes()[:3000]
    ends_well(folder, {name: noise})
    ends_well(folder, {name: content + noise + b"\n" + content})


@pytest.mark.parametrize("number", range(4 * COUNT))
def test_every_command_ends_well_on_a_run_that_says_what_cannot_be(tmp_path, number):
    for words, run in reading.runs(Random(number), tmp_path, 5):  # noqa: S311  # repeatable
        assert len(run().how) == 1, words


FILES = Path(__file__).parents[2] / "data" / "files"


def json_bytes(fields):
    return json.dumps(fields).encode()


SEEDS = [
    (FILES / name).read_bytes()
    for name in (
        "12-console-v1.log",
        "14-scheduler-dump-k8s.log",
        "16-metrics.txt",
        "01-iteration-kv-full.log",
        "02-forum-first-step.log",
        "05-inference-perf-one-line.json",
    )
] + [
    (START + every_10_s({}, {"waiting": 3, "kv": 95}, {"output": 0.0})).encode(),
    b"".join(
        b"2026-05-19T10:00:00.1Z stdout F " + line for line in every_10_s({}, {}).encode().splitlines(True)
    ),
    json_bytes(
        {"metadata": {"guidellm_version": "1"}, "benchmarks": [{"type_": "x", **RUN}, {"config": {}, **RUN}]}
    ),
    json_bytes(AIPERF),
    json_bytes({"completed": 2, "total_input_tokens": 20, "request_throughput": 0.6, "mean_ttft_ms": 30.0}),
]


def broken(random_, content):
    """A copy with bytes, numbers or lines changed, or another kind mixed in."""
    kind = random_.randrange(6)
    if kind == 0:
        data = bytearray(content)
        for _ in range(random_.randint(1, 20)):
            data[random_.randrange(len(data))] = random_.randrange(256)
        return bytes(data)
    if kind == 1:
        at = random_.randrange(len(content))
        return content[:at] + content[at + random_.randint(1, 200) :]
    lines = content.split(b"\n")
    if kind == 2:
        random_.shuffle(lines)
    elif kind == 3:
        other = random_.choice(SEEDS).split(b"\n")
        for _ in range(10):
            lines.insert(random_.randrange(len(lines) + 1), random_.choice(other))
    elif kind == 4:
        place = random_.randrange(len(lines))
        lines[place] = lines[place].replace(b"1", b"9" * random_.choice([2, 30, 400]))
    else:
        lines = [line for line in lines if random_.random() < 0.7] * random_.randint(1, 3)
    return b"\n".join(lines)


@pytest.mark.parametrize("seed", range(3 * COUNT))
def test_a_damaged_record_is_read_or_refused(tmp_path, seed):
    refusals = []
    random_ = random.Random(seed)  # noqa: S311  # the same cases every time
    path = tmp_path / "x"
    for _ in range(40):
        path.write_bytes(broken(random_, random_.choice(SEEDS)))
        try:
            kind = kind_of(path)
            if kind is not None and kind.reader is not None:
                kind.reader(path)
            if kind is None or kind.record is None:
                continue
            records = Records(records=described("x", kind.record.read(path)))
        except SchedtraceError as error:
            refusals.append(str(error))
            continue
        page = records_page(records)
        json_of(records)
        assert json_renderer.render(page).startswith("{")
        assert text.render(page, width=80)
        for record in records.records:
            for latency in record.latencies:
                assert all(
                    value is None or 0 <= value < 1e12
                    for value in (latency.mean_ms, latency.p50_ms, latency.p99_ms)
                )
            for engine in record.engines:
                assert 0 <= engine.running.low <= engine.running.high < 10**9
                assert engine.kv_cache_usage_frac is None or engine.kv_cache_usage_frac.high <= 1
            for statement in record.statements:
                assert (
                    statement.at is None or statement.snapshots is None or statement.at <= statement.snapshots
                )
    assert not any("\n" in refusal for refusal in refusals)


def test_ten_lines_in_noise_cost_little_memory(tmp_path):
    path = tmp_path / "x.log"
    noise = b'INFO:     10.0.0.1:4242 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n' * 14_000
    with path.open("wb") as file:
        for place in range(20):
            file.write(noise)
            if place % 2:
                file.write(periodic(10 * place).encode() + b"\n")
    tracemalloc.start()
    kind = kind_of(path)
    [record] = described("x", kind.record.read(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert record.engines[0].snapshots == 10
    assert peak < 24 * 2**20
