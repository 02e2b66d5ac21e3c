"""Traces in S3, with the credentials of the environment: a server of moto on this machine."""

import msgspec
import pytest

pytest.importorskip("s3fs", reason="needs the extra s3")
pytest.importorskip("moto.server", reason="needs moto[server]")

from schedtrace.errors import InputError
from schedtrace.fleet import engines
from schedtrace.fleet.inputs import find_fleet
from schedtrace.fleet.reduce import fleet_report
from schedtrace.fleet.summary_cache import SummaryCache

pytestmark = pytest.mark.filterwarnings("default")  # of boto and its dependencies


@pytest.fixture(scope="module")
def server():
    from moto.server import ThreadedMotoServer

    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    yield "http://{}:{}".format(*running.get_host_and_port())
    running.stop()


@pytest.fixture
def bucket(server, monkeypatch):
    """A new bucket, which only the environment leads to."""
    import boto3
    import s3fs

    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    boto3.client("s3").create_bucket(Bucket="traces")
    return "s3://traces"


@pytest.fixture
def both(engine_at, tmp_path, bucket):
    """The same three engines in a folder and in the bucket."""
    import s3fs

    for number in range(3):
        engine_at(f"host={number}/engine-0", requests=3 + number)
    address = f"{bucket}/{tmp_path.name}"
    s3fs.S3FileSystem().put(str(tmp_path / "fleet"), f"{address}/", recursive=True)
    return tmp_path / "fleet", f"{address}/fleet"


def test_a_bucket_gives_the_same_report_as_a_folder(both, read_here):
    folder, address = both
    local, remote = (msgspec.json.encode(fleet_report(read_here(root))).decode() for root in both)
    assert remote.replace(address, str(folder)) == local
    assert [engine.name for engine in find_fleet([f"{address}/host=*/engine-0"]).engines] == [
        f"host={number}/engine-0" for number in range(3)
    ]


def test_unchanged_objects_are_not_downloaded_again(both, read_here, tmp_path, monkeypatch):
    _, address = both
    (tmp_path / "kept").mkdir()
    first = read_here(address, cache=SummaryCache(tmp_path / "kept"))
    monkeypatch.setattr(engines, "read_engine", lambda _: pytest.fail("read"))
    assert read_here(address, cache=SummaryCache(tmp_path / "kept")).by_name == first.by_name


def test_a_bucket_that_is_not_there_is_an_input_error(bucket):
    with pytest.raises(InputError, match="nothing-there"):
        find_fleet([f"{bucket}-nothing-there/x"])
