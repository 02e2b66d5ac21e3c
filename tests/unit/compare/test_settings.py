import pytest

from schedtrace.compare.comparability import changed_settings
from schedtrace.model.manifest import Configured
from schedtrace.read.run import FrontEndRecord
from tests.makers import manifest, step, workload


def told(base, new):
    """``(name, base, new, given)`` of every setting that differs."""
    return [(one.name, one.base, one.new, one.given) for one in changed_settings(base=base, new=new)]


def changes(run_of, base, new):
    """The same between two manifests."""
    return told(run_of("a", step(0), about=manifest(**base)), run_of("b", step(0), about=manifest(**new)))


def config(given, **scheduler):
    return {"engine_args_given": given, "config_resolved": {"scheduler_config": scheduler}}


BOTH = {**config({"max_num_seqs": 4}, max_num_seqs=4), "workload": workload(), "environment": {"A": "1"}}


@pytest.mark.parametrize(
    ("base", "new", "differ"),
    [
        pytest.param(BOTH, BOTH, [], id="nothing"),
        pytest.param(
            config({}, max_num_seqs=256, cuda_graph_size=8, policy="fcfs"),
            config({"policy": "priority"}, max_num_seqs=128, cuda_graph_size=8, policy="priority"),
            [
                ("scheduler_config.policy", "fcfs", "priority", True),
                ("scheduler_config.max_num_seqs", 256, 128, False),
            ],
            id="what a person gave comes before what vLLM resolved",
        ),
        pytest.param(
            config({"max_num_seqs": 4}, max_num_seqs=4),
            config({}, max_num_seqs=256),
            [("scheduler_config.max_num_seqs", 4, 256, True)],
            id="given on the base side only is given, too",
        ),
        pytest.param(
            {"workload": workload(prequeue=False), "environment": {"VLLM_X": "1", "VLLM_OLD": "1"}},
            {"workload": workload(prequeue=True), "environment": {"VLLM_X": "2", "VLLM_NEW": "2"}},
            [
                ("workload.prequeue", False, True, True),
                ("environment.VLLM_NEW", None, "2", True),
                ("environment.VLLM_OLD", "1", None, True),
                ("environment.VLLM_X", "1", "2", True),
            ],
            id="workload and environment are given; a variable may be set on one side only",
        ),
        pytest.param(
            config({}, seed=None),
            config({}, seed=5),
            [("scheduler_config.seed", None, 5, False)],
            id="known to be none is known",
        ),
        pytest.param(
            {"config_resolved": {"parallel_config": {"data_parallel_master_port": 1}}},
            {"config_resolved": {"parallel_config": {"data_parallel_master_port": 2}}},
            [],
            id="a port that each start draws is no setting",
        ),
    ],
)
def test_what_differs_is_named_and_nothing_else(run_of, base, new, differ):
    assert changes(run_of, base, new) == differ


@pytest.mark.parametrize(
    "full",
    [
        {"environment": {"VLLM_X": "1"}},
        {"workload": workload(), "config_resolved": {"cache_config": {"block_size": 10}}},
    ],
)
def test_what_is_known_of_one_side_only_does_not_differ(run_of, full):
    bare, manifested = run_of("a", step(0)), run_of("b", step(0), about=manifest(**full))
    assert told(bare, manifested) == told(manifested, bare) == []


def test_where_a_run_was_recorded_to_is_no_setting(run_of):
    for name in ("SCHEDTRACE_DIR", "SCHEDTRACE_RUN_DIR", "SCHEDTRACE_TRIAL_IDS", "SCHEDTRACE_LINES"):
        base, new = ({"environment": {name: value}} for value in "ab")
        assert changes(run_of, base, new) == changes(run_of, base, {}) == []


def test_without_manifests_every_setting_of_the_headers_is_compared(run_of):
    names = ["device", "kv_blocks_total", "model", "scheduler_class", "token_budget", "vllm_version"]
    new = dict.fromkeys(names, "other") | {"kv_blocks_total": 7, "token_budget": 8}
    found = told(run_of("a", step(0)), run_of("b", step(0), **new, scheduler_config={"max_num_seqs": 9}))
    assert sorted(name for name, *_ in found) == [*names[:4], "scheduler_config.max_num_seqs", *names[4:]]
    assert ("kv_blocks_total", 100, 7, False) in found


def test_defaults_of_two_usage_contexts_are_named_as_such(run_of, recorded_words):
    sides = {}
    for context, seats in (("LLM_CLASS", 256), ("OPENAI_API_SERVER", 128)):
        run = run_of(context, step(0), max_num_running_reqs=seats, scheduler_config={"max_num_seqs": seats})
        defaults = {"max_num_seqs": {"LLM_CLASS": 256, "OPENAI_API_SERVER": 128}}
        made = Configured(at_unix_us=0, usage_context=context, context_defaults=defaults)
        run.front_end = FrontEndRecord(made)
        sides[context] = run
    [change] = changed_settings(base=sides["LLM_CLASS"], new=sides["OPENAI_API_SERVER"])
    seats = ("scheduler_config.max_num_seqs", 256, 128, False)
    assert (change.name, change.base, change.new, change.given) == seats
    recorded_words(change.base_origin, change.new_origin)


def test_settings_that_decide_scheduling_come_before_others_that_vllm_resolved(run_of, recorded_words):
    base, new = (
        {"engine_args_given": {"scheduling_policy": "priority"}, "config_resolved": {"a": {"x": value}}}
        for value in (1, 2)
    )
    runs = [
        run_of(name, step(0), about=manifest(**about), scheduler_config={"policy": policy})
        for name, about, policy in (("a", base, "priority"), ("b", new, "fcfs"))
    ]
    found = changed_settings(base=runs[0], new=runs[1])
    assert [(change.name, change.given) for change in found] == [
        ("scheduler_config.policy", True),
        ("a.x", False),
    ]
    recorded_words(change.base_origin for change in found)


def server(run_of, name, *options, given=None, **settings):
    """A server that was started with these options, and what its header and its front end recorded."""
    about = manifest(status="attached", command=["vllm", "serve", "tiny", *options])
    about.environment = {"SCHEDTRACE_DIR": f"/logs/{name}", "VLLM_X": name}
    run = run_of(name, step(0), about=about, settings=settings)
    run.front_end = None if given is None else FrontEndRecord(Configured(at_unix_us=0, given=given))
    return run


def test_the_changed_option_comes_first_and_the_recording_folder_is_no_setting(run_of, recorded_words):
    option, field = "--kv-cache-memory-bytes", "cache_config.kv_cache_memory_bytes"
    sides = [
        server(
            run_of,
            name,
            "--port",
            port,
            option,
            size,
            given={"kv_cache_memory_bytes": value, "scheduling_policy": "fcfs"},
            **{field: value},
        )
        for name, port, size, value in (("a", "8000", "4M", 4_000_000), ("b", "8001", "31M", 31_000_000))
    ]
    assert told(*sides) == [
        (field, 4_000_000, 31_000_000, True),
        ("environment.VLLM_X", "a", "b", True),
    ]
    [change, _] = changed_settings(base=sides[0], new=sides[1])
    recorded_words(change.base_origin, change.new_origin)


def test_no_value_is_a_value_where_both_sides_record_it(run_of):
    """None keeps every block of a window cached; a trace that lacks the setting says nothing."""
    name = "cache_config.prefix_cache_retention_interval"
    dense, ends, unknown = (
        run_of(folder, step(0), settings=settings)
        for folder, settings in (("a", {name: None}), ("b", {name: 0}), ("c", {}))
    )
    assert told(dense, ends) == [(name, None, 0, False)]
    assert told(ends, unknown) == []


def test_an_option_of_which_only_the_command_tells_is_compared_as_it_was_typed(run_of, recorded_words):
    base = server(run_of, "a", "--api-server-count", "2", "--enable-x")
    new = server(run_of, "a", "--api-server-count=3", "--hf-overrides", '{"a": 1}')
    assert told(base, new) == [
        ("--api-server-count", "2", "3", True),
        ("--enable-x", "", None, True),
        ("--hf-overrides", None, '{"a": 1}', True),
    ]
    [_, switch, _] = changed_settings(base=base, new=new)
    recorded_words(switch.base_origin, switch.new_origin)
    assert told(base, base) == []


def test_an_option_says_nothing_beside_a_run_of_which_the_command_is_another(run_of):
    served = server(run_of, "a", "--api-server-count", "2")
    made = run_of("b", step(0), about=manifest(command=["schedtrace", "run", "--trials", "3"]))
    assert not [name for name, *_ in told(served, made) if name.startswith("--")]
