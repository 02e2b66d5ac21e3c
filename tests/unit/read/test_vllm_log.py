"""vLLM's console log: all forms of its lines, all prefixes, starts, sources, failures, dumped steps."""

from pathlib import Path

import pytest

from schedtrace.errors import InputError
from schedtrace.model.records import DumpedRequest, DumpedStep, Failure, Range
from schedtrace.read.kinds import kind_of
from schedtrace.read.records import console_lines
from schedtrace.read.records.console_lines import arguments_in, snapshot_in, time_in
from schedtrace.read.records.failure_lines import UNNAMED, step_in, step_with_stats
from schedtrace.read.records.vllm_log import NAME, read_vllm_log
from tests.console_logs import START, every_10_s, message, periodic

FILES = Path(__file__).parents[2] / "data" / "files"
BARE = (
    "Avg prompt throughput: 1254.4 tokens/s, Avg generation throughput: 29.2 tokens/s, Running: 10 reqs, "
    "Waiting: 4 reqs"
)

RATES = "Prefix cache hit rate: 1.0%, External prefix cache hit rate: 2.5%, MM cache hit rate: 99.0%"
FETCH = "KV fetch: 1 waiting to start, 2 in progress, 0 completed waiting"
NONE = "Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 1 reqs, "


@pytest.fixture
def logs(tmp_path):
    """``logs("...")``: the servers in a log of this content."""

    def read(content):
        path = tmp_path / "x.log"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        kind = kind_of(path)
        assert kind is not None
        assert kind.name == NAME
        return read_vllm_log(path)

    return read


@pytest.mark.parametrize(
    ("line", "rank", "engines", "figures"),
    [
        # 0.8 and older
        (
            f"{BARE}, GPU KV cache usage: 57.9%, Prefix cache hit rate: 40.5%",
            0,
            1,
            (None, 0.579, 0.405, None, None),
        ),
        # 0.9 to 0.11
        (
            f"Engine 003: {BARE}, GPU KV cache usage: 57.9%, Prefix cache hit rate: 40.5%",
            3,
            1,
            (None, 0.579, 0.405, None, None),
        ),
        # newer: external cache, multimodal cache, preemptions
        (
            f"Engine 000: {BARE}, Preemptions: 3, GPU KV cache usage: 7.0%, {RATES}",
            0,
            1,
            (None, 0.07, 0.01, 0.025, 3),
        ),
        # 0.30 and newer: deferred, another device, no hit rate
        (
            f"Engine 012: {BARE}, Deferred: 2 reqs, XPU KV cache usage: 100.0%",
            12,
            1,
            (2, 1.0, None, None, None),
        ),
        (
            f"Engine 000: {BARE}, {FETCH}, CPU KV cache usage: 0.0%, External prefix cache hit rate: 3.0%",
            0,
            1,
            (None, 0.0, None, 0.03, None),
        ),
        (
            f"4 Engines Aggregated: {BARE}, GPU KV cache usage: 12.5%",
            None,
            4,
            (None, 0.125, None, None, None),
        ),
        (f"Engine 000: {BARE}, GPU KV cache usage: n/a", 0, 1, (None, None, None, None, None)),
        (f"Engine 000: {BARE}, GPU KV cache usage: 157.9%", 0, 1, (None, None, None, None, None)),
    ],
)
def test_every_form_of_a_periodic_line_is_read(line, rank, engines, figures):
    shown = snapshot_in(line)
    assert shown is not None
    assert shown[:2] == (rank, engines)
    snapshot = shown[2]
    assert snapshot[1:5] == (1254.4, 29.2, 10, 4)
    assert snapshot[5:] == figures
    assert snapshot.waiting_for_capacity == 4 - (figures[0] or 0)


@pytest.mark.parametrize(
    "line",
    [
        f"{NONE}Swapped: 0 reqs, Pending: 0 reqs, GPU KV cache usage: 0.0%, CPU KV cache usage: 0.0%",
        f"{NONE}Waiting: 0 reqs".replace("throughput: 0.0", "throughput: x"),
        f"{NONE}Waiting: 0 reqs".removeprefix("Avg prompt throughput: 0.0 tokens/s, "),
        f"{NONE}Waiting: 0 reqs".replace("0.0", "9" * 30),
    ],
)
def test_other_lines_are_none(line):
    assert snapshot_in(line) is None


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "(APIServer pid=3646) INFO 05-19 10:13:11 [loggers.py:271] ",
        "INFO 05-19 10:13:11 loggers.py:78] ",
        "\x1b[1;36m(APIServer pid=1)\x1b[0;0m INFO 05-19 10:13:11 [v1/metrics/loggers.py:271] ",
        "2026-05-19T08:13:11.123456789Z stdout F (APIServer pid=1) INFO 05-19 10:13:11 [loggers.py:271] ",
        "2026-05-19T08:13:11.123456789Z (APIServer pid=1) INFO 05-19 10:13:11 [loggers.py:271] ",
        "May 19 10:13:11 host vllm[123]: INFO 05-19 10:13:11 [loggers.py:271] ",
        "then we saw (APIServer pid=1) INFO 05-19 10:13:11 [loggers.py:271] ",
        "> ",
        "    ",
    ],
)
def test_any_prefix_may_stand_before_it(logs, prefix):
    [log] = logs("other\n" + prefix + f"Engine 000: {BARE}, GPU KV cache usage: 57.9%\n")
    [engine] = log.engines
    [snapshot] = engine.snapshots
    assert (snapshot.running, snapshot.kv_cache_usage_frac, log.source) == (10, 0.579, None)
    has_time = "05-19" in prefix
    assert snapshot.at_s == (time_in("INFO 05-19 10:13:11 ") if has_time else None)


@pytest.mark.parametrize(
    ("prefix", "source"),
    [
        ("vllm-1  | (APIServer pid=1) ", "vllm-1"),
        ("[pod/llm-7d9f/vllm] ", "llm-7d9f/vllm"),
        ("llm-7d9f vllm (APIServer pid=1) INFO 05-19 10:13:11 [loggers.py:271] ", "llm-7d9f/vllm"),
        ("ns llm-7d9f vllm INFO 05-19 10:13:11 [loggers.py:271] ", "ns/llm-7d9f/vllm"),
        ("llm-7d9f vllm 2026-05-19T08:13:11.123Z (APIServer pid=1) ", "llm-7d9f/vllm"),
    ],
)
def test_the_source_of_a_line_is_kept(logs, prefix, source):
    [log] = logs(f"{prefix}Engine 000: {BARE}\n")
    assert log.source == source


def test_sources_in_one_file_are_told_apart(logs):
    lines = [f"vllm-{place % 2}  | {periodic(10 * place, running=place)}" for place in range(6)]
    assert [
        [snapshot.running for snapshot in log.engines[0].snapshots] for log in logs("\n".join(lines))
    ] == [
        [0, 2, 4],
        [1, 3, 5],
    ]


def test_pods_that_stern_names_are_told_apart(logs):
    """A line of a traceback without vLLM's prefix belongs to a pod that another line has named."""
    pods = ("llm-prefill-6458459f69-qxv6j vllm", "llm-decode-6c7676b65c-xfqp6 vllm")
    lines = [f"{pods[place % 2]} {periodic(10 * place, running=place)}" for place in range(6)]
    lines.append(f"{pods[1]} EngineCore encountered a fatal error.")
    prefill, decode = logs("\n".join(lines))
    assert [snapshot.running for snapshot in prefill.engines[0].snapshots] == [0, 2, 4]
    assert [snapshot.running for snapshot in decode.engines[0].snapshots] == [1, 3, 5]
    assert (prefill.failure, decode.failure.stage) == (None, "serving")


def test_servers_that_write_to_one_terminal_are_told_apart(logs):
    """Prefill and decode servers of one host, started by one script."""
    lines = [
        periodic(5 * place, running=place).replace("pid=1)", f"pid={100 + place % 2})") + "\n"
        for place in range(6)
    ]
    first, second = logs(START.replace("EngineCore pid=7", "APIServer pid=100") + "".join(lines))
    assert [line.running for line in first.engines[0].snapshots] == [0, 2, 4]
    assert [line.running for line in second.engines[0].snapshots] == [1, 3, 5]
    assert [log.source for log in (first, second)] == ["APIServer pid=100", "APIServer pid=101"]
    assert (first.start.max_num_seqs, second.start.max_num_seqs) == (64, None)
    [notice] = first.notices
    assert notice.startswith("several servers wrote this log at once")


def test_replicas_of_ray_are_told_apart(logs):
    """Ray names the actor that prints a line; an engine's process names itself behind it."""
    actors = ("ServeReplica:app:LLM pid=11, ip=10.0.0.1", "MapWorker(MapBatches(vLLM)) pid=12, ip=10.0.0.2")
    lines = [
        f"({actors[place % 2]}) {periodic(10 * place, running=place).removeprefix('(APIServer pid=1) ')}\n"
        for place in range(6)
    ]
    fatal = f"({actors[1]}) {message('ERROR', 'EngineCore encountered a fatal error.')}"
    worker = "(RayWorkerWrapper pid=99, ip=10.0.0.2) INFO 05-19 10:00:00 [x.py:1] KV cache size: 16 tokens\n"
    first, second = logs("".join(lines) + fatal + worker)
    assert [line.running for line in first.engines[0].snapshots] == [0, 2, 4]
    assert [line.running for line in second.engines[0].snapshots] == [1, 3, 5]
    assert [log.source for log in (first, second)] == list(actors)
    assert (first.failure, second.failure.stage) == (None, "serving")


def test_lines_of_engines_belong_to_the_server_that_starts(logs):
    version = message("INFO", "vLLM API server version 0.11.0").replace(
        "EngineCore pid=7", "APIServer pid={}"
    )
    cache = message("INFO", "GPU KV cache size: {} tokens", "kv_cache_utils.py:1087")
    [log] = logs(cache.format(5) + periodic(0) + "\n")
    assert (log.start.kv_cache_tokens, log.source) == (5, None)
    text = version.format(1) + cache.format(5) + periodic(0) + "\n" + version.format(2) + periodic(10) + "\n"
    assert [(log.start.kv_cache_tokens, len(log.engines)) for log in logs(text + cache.format(9))] == [
        (5, 1),
        (9, 0),
    ]


def test_a_start_is_read(logs):
    [log] = logs(START + every_10_s({}))
    start = log.start
    assert (start.vllm_version, start.model, start.max_num_seqs, start.token_budget) == (
        "0.11.0",
        "Qwen/Qwen3-8B",
        64,
        2048,
    )
    assert (start.max_model_len, start.kv_cache_tokens, start.max_concurrency) == (8192, 400_448, 48.88)
    assert start.arguments == {
        "model_tag": "m",
        "api_key": "(hidden)",
        "model": "Qwen/Qwen3-8B",
        "max_num_seqs": "64",
        "max_model_len": "8192",
    }


@pytest.mark.parametrize("verb", ["Setting", "Defaulting"])
def test_defaults_that_are_logged_for_debugging_are_read(logs, verb):
    version = message("INFO", "vLLM API server version 0.32.0", "api_server.py:1839")
    defaults = "".join(
        message(
            "DEBUG", f"{verb} {name} to {value} for OPENAI_API_SERVER usage context.", "arg_utils.py:1672"
        )
        for name, value in (("max_num_batched_tokens", 8192), ("max_num_seqs", 1024))
    )
    [log] = logs(version + defaults)
    assert (log.start.max_num_seqs, log.start.token_budget) == (1024, 8192)


def test_the_newer_form_of_the_cache_is_read(logs):
    [log] = logs(
        message(
            "INFO",
            "CPU KV cache size: 34,952 tokens, Maximum concurrency for 8,192 tokens per request: 4.27x",
        )
    )
    assert (log.start.kv_cache_tokens, log.start.max_model_len, log.start.max_concurrency) == (
        34_952,
        8192,
        4.27,
    )


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("{'a': 1, 'b': 'x'}", {"a": 1, "b": "x"}),
        ("{'a': 1, 'b': <object at 0x7f>, 'max_num_seqs': 8}", {"a": 1, "max_num_seqs": 8}),
        ("{broken", None),
        ("{1, 2}", None),
    ],
)
def test_arguments_are_read_without_running_anything(text, arguments):
    assert arguments_in(text) == arguments


def test_a_later_start_is_another_server(logs):
    first, second = logs(START + every_10_s({"running": 1}) + START + every_10_s({"running": 2}))
    assert [log.engines[0].snapshots[0].running for log in (first, second)] == [1, 2]


def test_arguments_of_a_later_start_are_its_own(logs):
    newer = START.split("\n", 1)[1]  # newer releases print a logo in place of the first line
    first, second = logs(newer + every_10_s({}) + newer.replace("'max_num_seqs': 64", "'max_num_seqs': 8"))
    assert [log.start.max_num_seqs for log in (first, second)] == [64, 8]


def test_ranks_are_apart(logs):
    lines = [
        periodic(10 * (place // 2), running=place, engine=f"Engine 00{place % 2}: ") for place in range(4)
    ]
    [log] = logs("\n".join(lines))
    assert [(engine.engine_rank, len(engine.snapshots)) for engine in log.engines] == [(0, 2), (1, 2)]


def test_a_pasted_repeat_counts_once_and_is_noticed(logs):
    [log] = logs(periodic(0) + "\n" + periodic(0) + "\n" + periodic(10) + "\n")
    assert (len(log.engines[0].snapshots), log.notices) == (2, ["1 repeated periodic lines are left out"])


def test_the_latest_lines_count(logs, monkeypatch):
    monkeypatch.setattr(console_lines, "LATEST_SNAPSHOTS", 3)
    [log] = logs(every_10_s(*({"running": place} for place in range(11))))
    assert [snapshot.running for snapshot in log.engines[0].snapshots] == [6, 7, 8, 9, 10]
    assert log.notices == ["the file is long: only the latest 5 of 11 periodic lines count"]


def test_engines_share_the_lines_that_are_kept(logs, monkeypatch):
    monkeypatch.setattr(console_lines, "LATEST_SNAPSHOTS", 4)
    lines = [
        periodic(10 * (place // 2), running=place, engine=f"Engine 00{place % 2}: ") for place in range(24)
    ]
    [log] = logs("\n".join(lines))
    assert [[line.running for line in engine.snapshots] for engine in log.engines] == [[20, 22], [21, 23]]
    assert log.notices == ["the file is long: only the latest 4 of 24 periodic lines count"]


def test_what_a_client_wrote_counts_for_nothing(logs, tmp_path):
    prompt = f"INFO 05-19 10:00:00 [logger.py:39] Received request a: prompt: 'why {BARE}?', params: x\n"
    [log] = logs(prompt + every_10_s({"running": 1}))
    assert [snapshot.running for snapshot in log.engines[0].snapshots] == [1]
    path = tmp_path / "y.log"
    path.write_text(prompt)
    assert kind_of(path).name == "vLLM's log without iteration lines"


def test_periodic_lines_that_somebody_has_shortened_are_noticed(logs):
    short = "INFO 07-28 16:06:07 ... Running: 20 reqs, Waiting: 12 reqs, Deferred: 12 reqs, ...\n"
    prose = (
        "It always says **Running: 1 reqs, Waiting: 14 reqs**.\nprompt: 'Running: 1 reqs, Waiting: 1 reqs'\n"
    )
    [log] = logs(short + every_10_s({}, {}) + short + prose)
    assert log.notices == ["2 periodic lines are shortened or broken, and left out"]
    [log] = logs(every_10_s({}, {}) + periodic(20)[:-90])
    assert log.notices == []


def test_prose_that_quotes_a_log_is_noticed(logs):
    [log] = logs("We see this.\nIt is slow!\n" + periodic(0) + "\nAny idea?\n")
    assert log.notices == [
        "most lines are no log lines: if the file merely quotes a log, give the log itself"
    ]


@pytest.mark.parametrize("glue", ["", " "])
def test_records_that_lost_their_line_breaks_all_count(logs, glue):
    failed = message("ERROR", "EngineCore failed to start.")
    [log] = logs(glue.join([periodic(0), periodic(10), periodic(20), failed]))
    [engine] = log.engines
    assert [snapshot.at_s - engine.snapshots[0].at_s for snapshot in engine.snapshots] == [0.0, 10.0, 20.0]
    assert log.failure is not None
    [log] = logs(periodic(0) + " Received prompt: '" + periodic(10) + "'")
    assert log.engines[0].lines == 1


def test_iteration_lines_count_for_more_than_periodic_ones(tmp_path):
    path = tmp_path / "x.log"
    iteration = (
        "Engine 000: Iteration(0): 1 context requests, 5 context tokens, 0 generation requests, 0 generation "
        "tokens, iteration elapsed time: 2.00 ms\n"
    )
    path.write_text(every_10_s({}, {}) + iteration)
    assert kind_of(path).name == "vLLM's log with iteration details"


def test_acceptance_belongs_to_the_engine_of_the_line_before(logs):
    spec = (
        "SpecDecoding metrics: Mean acceptance length: 2.49, Accepted: 307 tokens, Drafted: 618 tokens, "
        "Per-position acceptance rate: 0.699, 0.466, Avg Draft acceptance rate: 49.7%"
    )
    [log] = logs(periodic(0) + "\n" + message("INFO", spec, "metrics.py:101") + periodic(10) + "\n")
    assert log.engines[0].acceptance_frac == Range(0.497, 0.497)


NO_ROOM = (
    "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV "
    "cache is needed, which is larger than the available KV cache memory (9.91 GiB). Based on the available "
    "memory, the estimated maximum model length is 81168."
)


BEFORE_THE_ENGINE = (
    "(APIServer pid=1) Traceback (most recent call last):\n"
    '(APIServer pid=1)   File "/usr/bin/vllm", line 8, in <module>\n'
    "(APIServer pid=1) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
    "(APIServer pid=1)   Value error, User-specified max_model_len (9999) is greater than 4096\n"
)
"""The end of a log whose server failed before it started an engine, in the front end's own words."""


def test_the_public_dump_is_read(logs):
    [log] = logs((FILES / "14-scheduler-dump-k8s.log").read_bytes())
    step = log.step
    assert (step.scheduled_tokens, step.running, step.waiting, step.preempted_requests) == (1537, 2, 0, [])
    assert round(step.kv_cache_usage_frac, 6) == 0.009563
    new, decode = step.requests
    assert (new.scheduled_tokens, new.computed_tokens, new.prompt_tokens, new.is_new) == (1536, 0, 2824, True)
    assert (decode.scheduled_tokens, decode.computed_tokens, decode.prompt_tokens, decode.is_new) == (
        1,
        24_609,
        None,
        False,
    )
    assert log.failure.worker_died == "VllmWorker-4 (exit code: None)"
    assert log.start.vllm_version == "0.26.1rc1.dev305+gadbf08d97.d20260805"


DUMP = (
    "Dumping scheduler output for model execution: SchedulerOutput(scheduled_new_reqs=[], "
    "scheduled_cached_reqs=CachedRequestData(req_ids=['a', 'b'], resumed_from_preemption=[false, true], "
    "new_token_ids=[[5], [6]], new_block_ids=[null, [[9]]], num_computed_tokens=[10, 20]), "
    "num_scheduled_tokens={a: 3, b: 40}, "
    "total_num_scheduled_tokens=43, scheduled_spec_decode_tokens={a: [7, 8]}, scheduled_encoder_inputs={}, "
    "num_common_prefix_blocks=[1], finished_req_ids=[], free_encoder_input_ids=[])"
)


def test_an_older_dump_with_drafts_and_a_resumed_request_is_read():
    step = step_in(DUMP)
    assert step.requests == [
        DumpedRequest(
            request_id="a",
            scheduled_tokens=3,
            computed_tokens=10,
            prompt_tokens=None,
            draft_tokens=2,
            is_new=False,
            is_resumed=False,
        ),
        DumpedRequest(
            request_id="b",
            scheduled_tokens=40,
            computed_tokens=20,
            prompt_tokens=None,
            draft_tokens=0,
            is_new=False,
            is_resumed=True,
        ),
    ]
    assert step.preempted_requests is None
    stats = "x SchedulerStats(num_running_reqs=2, num_waiting_reqs=1, gpu_cache_usage=0.5, x=1)"
    step = step_with_stats(stats, step)
    assert (step.running, step.waiting, step.kv_cache_usage_frac) == (2, 1, 0.5)


def test_requests_that_do_not_add_up_are_left_out():
    assert step_in(DUMP.replace("b: 40", "b: 41")).requests == []
    assert step_in(DUMP.replace("b: 40", "b: x")).requests == []
    assert step_in(DUMP[:200]) is None


def test_a_file_without_such_lines_is_refused(tmp_path):
    path = tmp_path / "x.log"
    path.write_text("INFO 05-19 10:00:00 [x.py:1] GET\n")
    with pytest.raises(InputError, match="not one line of vLLM's log is understood"):
        read_vllm_log(path)


ALONE = (
    "SchedulerOutput(scheduled_new_reqs=[], scheduled_cached_reqs=[CachedRequestData(req_id='c-1', "
    "resumed_from_preemption=false, new_token_ids=[311], new_block_ids=[[]], num_computed_tokens=295), "
    "CachedRequestData(req_id='c-2', resumed_from_preemption=true, new_token_ids=[], new_block_ids=[[7]], "
    "num_computed_tokens=64)], num_scheduled_tokens={c-1: 1, c-2: 48}, total_num_scheduled_tokens=49, "
    "scheduled_spec_decode_tokens={}, scheduled_encoder_inputs={}, num_common_prefix_blocks=[19])"
)


def test_a_dump_with_one_object_per_request_is_read():
    shown = step_in(ALONE)
    assert [
        (each.request_id, each.scheduled_tokens, each.computed_tokens, each.is_resumed)
        for each in shown.requests
    ] == [("c-1", 1, 295, False), ("c-2", 48, 64, True)]


@pytest.mark.parametrize(
    ("announcement", "stage"),
    [
        ("WorkerProc failed to start.", "start"),
        ("WorkerProc hit an exception.", "serving"),
        ("engine_core = EngineCoreProc(*args, **kwargs)", "start"),
        ("    engine_core.run_busy_loop()", "serving"),
        ("Worker proc VllmWorker-1 died unexpectedly, shutting down executor.", "serving"),
    ],
)
def test_any_announcement_of_a_failure_makes_a_file_a_log(logs, announcement, stage):
    """Half of a traceback is what people paste."""
    [log] = logs(message("ERROR", announcement) + message("ERROR", "IndexError: tuple index out of range"))
    assert (log.failure.stage, log.failure.reason) == (stage, "IndexError: tuple index out of range")


def frame(place, function):
    return f'  File "/x/site-packages/vllm/v1/{place}", line 7, in {function}'


PART = "a part of a traceback from vLLM"
NO_MEMORY = "ValueError: No available memory for the cache blocks."
RAISED = '    raise ValueError("No available memory for the cache blocks. "'
IN_START = frame("core/kv_cache_utils.py", "check_enough_kv_cache_memory")
IN_STEP = frame("engine/core.py", "_process_engine_step")
VERSION = message("INFO", "vLLM API server version 0.32.0", "api_server.py:1839")
ENGINE_FAILED = message("ERROR", "EngineCore failed to start.", "core.py:708")
FATAL = message("ERROR", "EngineCore encountered a fatal error.")
DEAD = message("ERROR", "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.")
SHUTDOWN = message("INFO", "[shutdown] API server: shutdown triggered", "launcher.py:254")
CLEANUP = message(
    "WARNING", "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup"
) + message("INFO", "[shutdown] MPClient: start timeout=default", "core_client.py:770")
"""Lines that vLLM 0.32 prints for its own cleanup, before it finds the engine dead."""
MISTAKE = message("ERROR", "ValueError: a client's mistake")


def in_engine(*lines):
    return "".join(f"(EngineCore_DP0 pid=7) {line}\n" for line in lines)


def failed(stage, reason, line, worker_died=None):
    return Failure(stage=stage, reason=reason, line=line, worker_died=worker_died)


FAILURES = {
    "a failed start has its first error": (
        message("WARNING", "ImportError: no flash attention")
        + ENGINE_FAILED
        + message("ERROR", "Traceback (most recent call last):", "core.py:708")
        + message("ERROR", NO_ROOM, "core.py:708")
        + "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed "
        "core proc(s): {}\n",
        failed("start", NO_ROOM, 4),
    ),
    "the worker's error comes before the engine's": (
        message("ERROR", "WorkerProc failed to start.")
        + message("ERROR", "torch.OutOfMemoryError: CUDA out of memory. token=abc")
        + ENGINE_FAILED
        + message("ERROR", "Exception: WorkerProc initialization failed due to an exception", "core.py:708"),
        failed("start", "torch.OutOfMemoryError: CUDA out of memory. token=(hidden)", 2),
    ),
    "an error long before is not the reason": (
        MISTAKE
        + "INFO 05-19 10:00:00 [x.py:1] GET\n" * 3000
        + every_10_s({})
        + message("ERROR", "Worker proc VllmWorker-1 died unexpectedly, shutting down executor."),
        failed("serving", "worker process VllmWorker-1 died", 3003, "VllmWorker-1"),
    ),
    # vLLM 0.32 drains its engine on SIGTERM, and its output handler then finds the engine dead
    "a shutdown that was asked for": (START + SHUTDOWN + DEAD, None),
    "a shutdown after the failure": (START + DEAD + SHUTDOWN, failed("serving", UNNAMED, 7)),
    "a killed engine": (
        START + CLEANUP + DEAD + SHUTDOWN,
        failed("serving", "the engine's process exited unexpectedly", 7),
    ),
    "cleanup after a shutdown that was asked for": (START + SHUTDOWN + CLEANUP + DEAD, None),
    "a start that fails before there is an engine": (
        VERSION + BEFORE_THE_ENGINE,
        failed(
            "start",
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig: "
            "Value error, User-specified max_model_len (9999) is greater than 4096",
            4,
        ),
    ),
    "a traceback before the cache": (VERSION + BEFORE_THE_ENGINE + START, None),
    "a traceback before periodic lines": (VERSION + BEFORE_THE_ENGINE + every_10_s({}), None),
    "a traceback of a front end that starts": (
        VERSION + BEFORE_THE_ENGINE + "(APIServer pid=1) INFO:     Application startup complete.\n",
        None,
    ),
    "a logged traceback": (
        VERSION
        + message("ERROR", "Traceback (most recent call last):")
        + message("ERROR", "ValueError: no such"),
        None,
    ),
    # releases up to 0.11 print a traceback of the engine's process when a server is interrupted
    "an interrupt": (
        every_10_s({})
        + in_engine(
            "Traceback (most recent call last):", "    engine_core.run_busy_loop()", "KeyboardInterrupt"
        ),
        None,
    ),
    "an interrupted start": (VERSION + in_engine(IN_START, "KeyboardInterrupt"), None),
    "errors without a failure": (MISTAKE + every_10_s({}), None),
    "the dead engine of V0 is another one": (
        every_10_s({})
        + message("ERROR", "vllm.engine.async_llm_engine.AsyncEngineDeadError: Task finished unexpectedly."),
        None,
    ),
    "an error without a text": (
        FATAL + message("ERROR", "AssertionError"),
        failed("serving", "AssertionError", 2),
    ),
    "a later error": (
        FATAL + message("ERROR", "AssertionError") + message("ERROR", "RuntimeError: later"),
        failed("serving", "AssertionError", 2),
    ),
    "code that raises": (
        FATAL + message("ERROR", "    raise NotImplementedError"),
        failed("serving", UNNAMED, 1),
    ),
    "an uncaught consequence is no reason": (
        VERSION
        + "Traceback (most recent call last):\n"
        + "RuntimeError: Engine process failed to start. See stack trace for the root cause.\n",
        failed("start", UNNAMED, 3),
    ),
}


@pytest.mark.parametrize(("content", "failure"), FAILURES.values(), ids=FAILURES)
def test_the_failure_of_a_log(logs, content, failure):
    assert [log.failure for log in logs(content)] == [failure]


@pytest.mark.parametrize(
    ("lines", "stage", "reason"),
    [
        ((IN_START, RAISED, NO_MEMORY), "start", NO_MEMORY),
        ((IN_START, RAISED), "start", NO_MEMORY),
        ((frame("worker/gpu_worker.py", "load_model"),), "start", UNNAMED),
        ((frame("worker/utils.py", "request_memory"), NO_MEMORY), "start", NO_MEMORY),
        ((IN_STEP, "RuntimeError: CUDA error"), "serving", "RuntimeError: CUDA error"),
        ((frame("worker/gpu_worker.py", "compile_or_warm_up_model"), IN_STEP), "start", UNNAMED),
    ],
)
def test_frames_show_whether_the_start_failed_where_the_beginning_is_cut(
    logs, tmp_path, lines, stage, reason
):
    text = "".join(message("ERROR", line, "core.py:708") for line in lines)
    [log] = logs(text)
    assert (log.failure.stage, log.failure.reason) == (stage, reason)
    path = tmp_path / "y.log"
    path.write_text(text)
    assert kind_of(path).name == NAME


@pytest.mark.parametrize("process", ["(EngineCore_DP0 pid=7) ", ""])
def test_a_traceback_of_a_start_needs_no_beginning(logs, process):
    """A process prints the error that ends it without a level and a time, and its front end another one."""
    started = "".join(f"{process}{line}\n\n" for line in (IN_START, RAISED, NO_MEMORY))
    front_end = "(APIServer pid=1) Traceback (most recent call last):\n(APIServer pid=1)     main()\n"
    [log] = logs(started + front_end)
    assert log.failure == Failure(stage="start", reason=NO_MEMORY, line=5, worker_died=None)
    [log] = logs(f"{process}{IN_START}\n{process}    raise ValueError(\n")
    assert (log.failure.stage, log.failure.reason) == ("start", UNNAMED)


def test_a_traceback_of_a_step_that_is_not_logged_needs_its_error(logs, tmp_path):
    """An interrupt looks the same as an error that is cut off."""
    step = f"Traceback (most recent call last):\n{IN_STEP}\n    outputs = self.step_fn()\n"
    [log] = logs(f"{step}TimeoutError: RPC call to sample_tokens timed out.\n")
    assert log.failure == Failure(
        stage="serving",
        reason="TimeoutError: RPC call to sample_tokens timed out.",
        line=4,
        worker_died=None,
    )
    path = tmp_path / "y.log"
    for end, name in (("TimeoutError: no\n", NAME), ("", PART), ("KeyboardInterrupt\nOSError: x\n", PART)):
        path.write_text(step + end)
        assert kind_of(path).name == name
    [log] = logs(START + step + "TimeoutError: no\n")
    assert log.failure is None


@pytest.mark.parametrize(
    "process", ["(APIServer pid=1) ", "", "(ServeReplica:app:LLM-8b pid=1, ip=10.0.0.1) "]
)
def test_lines_of_tracebacks_are_log_lines(logs, process):
    traceback = BEFORE_THE_ENGINE.replace("(APIServer pid=1) ", process)
    assert [log.notices for log in logs(VERSION + traceback)] == [[]]


def test_statistics_without_the_step_are_of_the_failure(logs):
    dumped = "SchedulerStats(num_running_reqs=65, num_waiting_reqs=35, kv_cache_usage=0.986, x=None)"
    stats, fatal = message("ERROR", dumped), message("ERROR", "EngineCore encountered a fatal error.")
    [log] = logs(stats + fatal)
    assert (log.step.scheduled_tokens, log.step.running, log.step.waiting) == (None, 65, 35)
    [log] = logs(stats + every_10_s({}))
    assert log.step is None


BROKEN = DUMP.split("CachedRequestData", 1)
"""A dump that somebody's terminal broke within a line."""


@pytest.mark.parametrize(
    "glue", ["CachedReque\nstData", "\n    CachedRequestData"], ids=["within a word", "between words"]
)
def test_a_dump_over_several_lines_is_joined(logs, glue):
    [log] = logs(
        message("ERROR", f"Dumping scheduler output: {glue.join(BROKEN)}")
        + message("ERROR", "Dumping scheduler stats: SchedulerStats(num_running_reqs=2, num_waiting_reqs=1)")
        + "total_num_scheduled_tokens=99\n"
    )
    assert (log.step.scheduled_tokens, len(log.step.requests)) == (step_in(DUMP).scheduled_tokens, 2)
    assert (log.step.running, log.step.waiting) == (2, 1)
    assert log.notices == []


def test_a_dump_that_is_cut_off_has_no_tokens(logs):
    begun = message("ERROR", f"Dumping scheduler output: {BROKEN[0]}", "dump_input.py:79")
    [log] = logs(begun)
    assert log.step == DumpedStep()
    assert log.notices == [
        "line 1: the dump of a step is cut off or broken, so that its tokens and requests are unknown"
    ]
    stats = "Dumping scheduler stats: SchedulerStats(num_running_reqs=2, num_waiting_reqs=1)"
    [log] = logs(begun + message("ERROR", stats, "dump_input.py:81"))
    assert log.step == DumpedStep(running=2, waiting=1)


OLD_FAILURE = (
    message("ERROR", "EngineCore hit an exception: Traceback (most recent call last):", "core.py:302")
    + message("ERROR", "    {frame}", "core.py:302")
    + message("ERROR", "ValueError: No available memory for the cache blocks.", "core.py:302")
)


@pytest.mark.parametrize(
    ("frame", "stage"),
    [
        ("engine_core = EngineCoreProc(*args, **kwargs)", "start"),
        ("engine_core.run_busy_loop()", "serving"),
    ],
)
def test_failures_of_0_8_are_told_apart_by_their_traceback(logs, tmp_path, frame, stage):
    text = OLD_FAILURE.format(frame=frame)
    [log] = logs(text)
    assert (log.failure.stage, log.failure.line) == (stage, 3)
    path = tmp_path / "y.log"
    path.write_text(text)
    assert kind_of(path).name == NAME
