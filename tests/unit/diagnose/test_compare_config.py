from schedtrace.diagnose.compare import compare
from tests.makers import manifest, step, workload


def changes(run_of, base, new):
    """``(name, base, new, given)`` of every setting that differs between two manifests."""
    told = compare(
        base=run_of("a", step(0), about=manifest(**base)), new=run_of("b", step(0), about=manifest(**new))
    )
    return [(one.name, one.base, one.new, one.given) for one in told.config]


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
        ("environment.VLLM_X", "1", "2", True),
        ("workload.prequeue", False, True, True),
    ]


def test_where_a_run_was_recorded_to_is_no_setting(run_of):
    base, new = ({"environment": {"SCHEDTRACE_RUN_DIR": folder}} for folder in "ab")
    assert changes(run_of, base, new) == []


def test_without_manifests_the_headers_are_compared(run_of):
    base = run_of("a", step(0), kv_blocks_total=40, scheduler_config={"max_num_seqs": 8})
    new = run_of("b", step(0), kv_blocks_total=50, scheduler_config={"max_num_seqs": 9})
    told = [(one.name, one.base, one.new, one.given) for one in compare(base=base, new=new).config]
    assert told == [("kv_blocks_total", 40, 50, False), ("scheduler_config.max_num_seqs", 8, 9, False)]
