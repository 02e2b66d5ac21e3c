import json

from schedtrace.model.manifest import FILE_NAME, read_manifest, write_manifest
from tests.makers import manifest, result, workload


def test_a_manifest_reads_back_as_it_was_written(tmp_path):
    written = manifest(
        label="x",
        command=["schedtrace", "run"],
        engine_args_given={"max_num_seqs": 4},
        config_resolved={"scheduler_config": {"max_num_seqs": 4}},
        workload=workload(request_rate=0.5),
        trials=[result(1, 2.5, prefix_cache_reset=True)],
    )
    write_manifest(tmp_path, written)
    assert read_manifest(tmp_path) == written


def test_a_folder_without_a_manifest_has_none(tmp_path):
    assert read_manifest(tmp_path) is None


def test_writing_again_replaces_the_manifest_and_leaves_no_part_behind(tmp_path):
    write_manifest(tmp_path, manifest(status="starting"))
    write_manifest(tmp_path, manifest(status="finished"))
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    assert json.loads((tmp_path / FILE_NAME).read_text())["status"] == "finished"
