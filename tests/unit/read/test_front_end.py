"""The front ends' files, read beside the traces."""

import msgspec

from schedtrace.model.manifest import Configured, RequestRefusal
from schedtrace.read.run import read_front_end, read_run
from tests.makers import arrival, run_folder, step

BEGAN = 1_000


def written(folder, pid, *lines, tail=b""):
    folder.mkdir(exist_ok=True)
    encoded = b"".join((x if isinstance(x, bytes) else msgspec.json.encode(x)) + b"\n" for x in lines)
    (folder / f"front-end-{pid}.jsonl").write_bytes(encoded + tail)


def configured(at, **given):
    return Configured(at_unix_us=at, given=given)


def test_the_engines_configuration_is_the_last_before_they_began(tmp_path):
    written(tmp_path, 7, configured(100, max_num_seqs=1), configured(900, max_num_seqs=2))
    written(tmp_path, 8, configured(500, max_num_seqs=3), configured(1_100, max_num_seqs=4))
    assert read_front_end(tmp_path, BEGAN).configured.given == {"max_num_seqs": 2}


def test_refusals_of_all_front_ends_are_in_order_of_time(tmp_path):
    written(tmp_path, 7, RequestRefusal(at_unix_us=30, reason="a"), RequestRefusal(at_unix_us=10, reason="b"))
    written(tmp_path, 8, RequestRefusal(at_unix_us=20, reason="c"))
    found = read_front_end(tmp_path, BEGAN)
    assert [line.reason for line in found.refused] == ["b", "c", "a"]
    assert found.configured is None


def test_broken_unknown_and_cut_lines_are_left_out(tmp_path):
    huge = b'{"type":"refused","at_unix_us":9999999999999999999,"reason":"x"}'
    odd = (
        huge,
        b"",
        b"{",
        b"\xff",
        b'{"type":"other"}',
        b'{"type":"refused","at_unix_us":"now","reason":"x"}',
        b"[" * 9_999,
    )
    cut = msgspec.json.encode(RequestRefusal(at_unix_us=40, reason="cut"))[:-5]
    written(tmp_path, 7, *odd, RequestRefusal(at_unix_us=30, reason="whole"), tail=cut)
    assert [line.reason for line in read_front_end(tmp_path, BEGAN).refused] == ["whole"]


def test_without_a_line_nothing_is_known(tmp_path):
    assert read_front_end(tmp_path, BEGAN) is None
    written(tmp_path, 7, tail=b'{"type":"conf')
    assert read_front_end(tmp_path, BEGAN) is None


def test_a_run_has_its_front_ends_and_counts_the_requests_of_all_its_engines(tmp_path):
    folder = run_folder(
        tmp_path / "run", step(0, arrived=[arrival("a", 0), arrival("b", 0)]), wall_anchor_us=50
    )
    run_folder(folder, step(0, arrived=[arrival("c", 0)]), engine_rank=1, wall_anchor_us=BEGAN)
    lines = (configured(40, policy="priority"), configured(60), RequestRefusal(at_unix_us=90, reason="x"))
    written(folder, 7, *lines)
    front_end = read_run(folder).front_end
    assert (front_end.configured.given, front_end.arrived) == ({"policy": "priority"}, 3)
    assert read_run(run_folder(tmp_path / "other", step(0))).front_end is None
