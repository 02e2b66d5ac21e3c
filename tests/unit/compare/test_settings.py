from schedtrace.compare.setting_changes import changed_settings
from schedtrace.model.manifest import Configured
from schedtrace.present.phrases import plain
from schedtrace.read.front_end_files import FrontEnd
from tests.makers import manifest, step, workload


def told(base, new):
    """``(name, base, new, given)`` of every setting that differs."""
    return [(one.name, one.base, one.new, one.given) for one in changed_settings(base=base, new=new)]


def changes(run_of, base, new):
    """The same between two manifests."""
    return told(run_of("a", step(0), about=manifest(**base)), run_of("b", step(0), about=manifest(**new)))


def config(given, **scheduler):
    return {"engine_args_given": given, "config_resolved": {"scheduler_config": scheduler}}


def test_the_same_settings_do_not_differ(run_of):
    same = {**config({"max_num_seqs": 4}, max_num_seqs=4), "workload": workload(), "environment": {"A": "1"}}
    assert changes(run_of, same, same) == []


def test_what_a_person_gave_comes_before_what_vllm_resolved(run_of):
    base = config({}, max_num_seqs=256, cuda_graph_size=8, policy="fcfs")
    new = config({"policy": "priority"}, max_num_seqs=128, cuda_graph_size=8, policy="priority")
    assert changes(run_of, base, new) == [
        ("scheduler_config.policy", "fcfs", "priority", True),
        ("scheduler_config.max_num_seqs", 256, 128, False),
    ]


def test_a_setting_given_on_the_base_side_only_is_given_too(run_of):
    [change] = changes(run_of, config({"max_num_seqs": 4}, max_num_seqs=4), config({}, max_num_seqs=256))
    assert change == ("scheduler_config.max_num_seqs", 4, 256, True)


def test_workload_and_environment_are_given_by_a_person(run_of):
    base = {"workload": workload(prequeue=False), "environment": {"VLLM_X": "1"}}
    new = {"workload": workload(prequeue=True), "environment": {"VLLM_X": "2"}}
    assert changes(run_of, base, new) == [
        ("workload.prequeue", False, True, True),
        ("environment.VLLM_X", "1", "2", True),
    ]


def test_a_variable_that_is_set_on_one_side_only_differs(run_of):
    base, new = {"environment": {"VLLM_OLD": "1"}}, {"environment": {"VLLM_NEW": "2"}}
    assert changes(run_of, base, new) == [
        ("environment.VLLM_NEW", None, "2", True),
        ("environment.VLLM_OLD", "1", None, True),
    ]


def test_a_variable_says_nothing_about_a_side_that_does_not_tell_its_own(run_of):
    bare, set_there = run_of("a", step(0)), run_of("b", step(0), about=manifest(environment={"VLLM_X": "1"}))
    assert told(bare, set_there) == told(set_there, bare) == []


def test_a_setting_that_is_known_on_one_side_only_does_not_differ(run_of):
    bare = run_of("a", step(0))
    full = {"workload": workload(), "config_resolved": {"cache_config": {"block_size": 10}}}
    manifested = run_of("b", step(0), about=manifest(**full))
    assert told(bare, manifested) == told(manifested, bare) == []


def test_a_setting_that_is_known_to_be_none_is_known(run_of):
    base, new = config({}, seed=None), config({}, seed=5)
    assert changes(run_of, base, new) == [("scheduler_config.seed", None, 5, False)]


def test_where_a_run_was_recorded_to_is_no_setting(run_of):
    for name in ("SCHEDTRACE_DIR", "SCHEDTRACE_RUN_DIR", "SCHEDTRACE_TRIAL_IDS", "SCHEDTRACE_LINES"):
        base, new = ({"environment": {name: value}} for value in "ab")
        assert changes(run_of, base, new) == changes(run_of, base, {}) == []


def test_without_manifests_the_headers_are_compared(run_of):
    base = run_of("a", step(0), kv_blocks_total=40, scheduler_config={"max_num_seqs": 8})
    new = run_of("b", step(0), kv_blocks_total=50, scheduler_config={"max_num_seqs": 9})
    assert told(base, new) == [
        ("kv_blocks_total", 40, 50, False),
        ("scheduler_config.max_num_seqs", 8, 9, False),
    ]


def test_every_setting_of_the_header_that_decides_scheduling_is_compared(run_of):
    names = ["device", "kv_blocks_total", "model", "scheduler_class", "token_budget", "vllm_version"]
    new = dict.fromkeys(names, "other") | {"kv_blocks_total": 7, "token_budget": 8}
    found = changed_settings(base=run_of("a", step(0)), new=run_of("b", step(0), **new))
    assert sorted(change.name for change in found) == names


def test_defaults_of_two_usage_contexts_are_named_as_such(run_of):
    sides = {}
    for context, seats in (("LLM_CLASS", 256), ("OPENAI_API_SERVER", 128)):
        run = run_of(context, step(0), max_num_running_reqs=seats, scheduler_config={"max_num_seqs": seats})
        defaults = {"max_num_seqs": {"LLM_CLASS": 256, "OPENAI_API_SERVER": 128}}
        made = Configured(at_unix_us=0, usage_context=context, context_defaults=defaults)
        run.front_end = FrontEnd(made)
        sides[context] = run
    [change] = changed_settings(base=sides["LLM_CLASS"], new=sides["OPENAI_API_SERVER"])
    assert (change.name, change.base, change.new, change.given) == (
        "scheduler_config.max_num_seqs",
        256,
        128,
        False,
    )
    assert plain(change.base_origin) == "default for LLM_CLASS"
    assert plain(change.new_origin) == "default for OPENAI_API_SERVER"


def test_settings_that_decide_scheduling_come_before_others_that_vllm_resolved(run_of):
    base, new = (
        {"engine_args_given": {"scheduling_policy": "priority"}, "config_resolved": {"a": {"x": value}}}
        for value in (1, 2)
    )
    runs = [
        run_of(name, step(0), about=manifest(**about), scheduler_config={"policy": policy})
        for name, about, policy in (("a", base, "priority"), ("b", new, "fcfs"))
    ]
    found = changed_settings(base=runs[0], new=runs[1])
    assert [(one.name, plain(one.base_origin)) for one in found] == [
        ("scheduler_config.policy", "given"),
        ("a.x", ""),
    ]


def test_a_port_that_each_start_draws_is_no_setting(run_of):
    base, new = (
        {"config_resolved": {"parallel_config": {"data_parallel_master_port": port}}} for port in (1, 2)
    )
    assert changes(run_of, base, new) == []


def server(run_of, name, *options, given=None, **settings):
    """A server that was started with these options, and what its header and its front end recorded."""
    about = manifest(status="attached", command=["vllm", "serve", "tiny", *options])
    about.environment = {"SCHEDTRACE_DIR": f"/logs/{name}", "VLLM_X": name}
    run = run_of(name, step(0), about=about, settings=settings)
    run.front_end = None if given is None else FrontEnd(Configured(at_unix_us=0, given=given))
    return run


def test_the_option_that_was_changed_comes_first_and_where_it_was_recorded_to_is_no_setting(run_of):
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
    assert (plain(change.base_origin), plain(change.new_origin)) == ("given", "given")


def test_an_option_of_which_only_the_command_tells_is_compared_as_it_was_typed(run_of):
    base = server(run_of, "a", "--api-server-count", "2", "--enable-x")
    new = server(run_of, "a", "--api-server-count=3", "--hf-overrides", '{"a": 1}')
    assert told(base, new) == [
        ("--api-server-count", "2", "3", True),
        ("--enable-x", "", None, True),
        ("--hf-overrides", None, '{"a": 1}', True),
    ]
    [_, switch, _] = changed_settings(base=base, new=new)
    assert (plain(switch.base_origin), plain(switch.new_origin)) == ("given", "not given")
    assert told(base, base) == []


def test_an_option_says_nothing_beside_a_run_of_which_the_command_is_another(run_of):
    served = server(run_of, "a", "--api-server-count", "2")
    made = run_of("b", step(0), about=manifest(command=["schedtrace", "run", "--trials", "3"]))
    assert not [name for name, *_ in told(served, made) if name.startswith("--")]
