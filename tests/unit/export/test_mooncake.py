"""A recorded load as a Mooncake trace: exact rows, and read again the load that it was."""

import json
from base64 import b64encode

import pytest

from schedtrace.workloads.timed_traces import MOONCAKE_BLOCK
from schedtrace.workloads.workload_files import open_workload
from tests.makers import arrival, finish, step

SIZE = 128
"""Tokens of a recorded block: four are one of Mooncake's."""


def hashes(*blocks):
    return b64encode(b"".join(block.to_bytes(3) for block in blocks)).decode()


def came(name, at_us, tokens, *blocks, **fields):
    texts = {"prefix_hashes": hashes(*blocks)} if blocks else {}
    return arrival(name, at_us, at_us, prompt_tokens=tokens, **texts, **fields)


def ended(name, tokens, status="LENGTH_CAPPED"):
    return finish(name, finished_us=9_000_000, output_tokens=tokens, status=status)


@pytest.fixture
def exported(run_of, cli, tmp_path):
    """``exported(*arrivals)``: the rows of the file, and what was printed."""

    def export(*arrivals, finished, **header):
        run_of(
            "run",
            step(0, arrived=list(arrivals)),
            step(1, finished=finished),
            block_size=SIZE,
            **header,
        )
        code, out, err = cli("export", tmp_path / "run", "--to", "mooncake")
        assert (code, err) == (0, "")
        file = tmp_path / "run" / "export" / "mooncake.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()], out, file

    return export


def test_times_lengths_and_blocks_that_are_shared(exported):
    four = (1, 2, 3, 4)
    rows, out, file = exported(
        came("a", 1_000_000, 1024, *four, 5, 6, 7, 8),
        came(
            "b", 1_002_600, 1100, *four, 5, 6, 7, 9
        ),  # the second block differs; 76 tokens are of no full block
        came("c", 1_900_000, 512, *four),
        came("d", 1_900_000, 600, *four),
        finished=[ended("a", 5), ended("b", 6), ended("c", 7), ended("d", 8)],
    )
    assert rows == [
        {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 3, "input_length": 1100, "output_length": 6, "hash_ids": [0, 2, 3]},
        {"timestamp": 900, "input_length": 512, "output_length": 7, "hash_ids": [0]},
        {"timestamp": 900, "input_length": 600, "output_length": 8, "hash_ids": [0, 4]},
    ]
    assert "whole blocks of 512 tokens are shared in the file; the trace has blocks of 128 tokens" in out
    load = open_workload(file)
    assert (load.prefix_block, [one.prefix for one in load]) == (
        MOONCAKE_BLOCK,
        [(0, 1), (0, 2, 3), (0,), (0, 4)],
    )
    assert [(one.arrived_us, one.prompt_tokens, one.output_tokens) for one in load] == [
        (0, 1024, 5),
        (3000, 1100, 6),
        (900_000, 512, 7),
        (900_000, 600, 8),
    ]


def test_equal_contents_behind_another_beginning_are_another_block(exported):
    rows, _, _ = exported(
        came("a", 0, 1024, *range(8)),
        came("b", 0, 1024, 9, 9, 9, 9, *range(4, 8)),
        finished=[ended("a", 1), ended("b", 1)],
    )
    assert [row["hash_ids"] for row in rows] == [[0, 1], [2, 3]]


def test_who_did_not_end_by_themselves_may_generate_what_was_asked_for(exported):
    rows, out, _ = exported(
        came("a", 0, 128, 1, max_tokens=20),
        came("b", 5000, 128, 1, max_tokens=30),
        came("c", 6000, 128, 1, max_tokens=40),
        finished=[ended("b", 2), ended("c", 3, "ABORTED")],
    )
    assert [(row["timestamp"], row["output_length"]) for row in rows] == [(0, 20), (5, 2), (6, 40)]
    assert "2 requests did not end by themselves: output_length is what they were allowed" in out


def test_without_hashes_there_are_no_ids(exported):
    rows, out, _ = exported(came("a", 0, 700), finished=[ended("a", 2)])
    assert rows == [{"timestamp": 0, "input_length": 700, "output_length": 2}]
    assert "which prompts begin alike is not recorded: the file has no hash_ids" in out
