"""Requests of a finished benchmark: when each was sent, and its lengths.

* ``vllm bench serve --save-detailed`` writes an object with a list for each fact: ``input_lens``,
  ``output_lens`` and, in newer releases, ``start_times`` in seconds.
* AIPerf's ``profile_export.jsonl`` has a line for each request, and names its units (``request_start_ns``;
  ``{"value": 550, "unit": "tokens"}``).
"""

from collections import Counter
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

import msgspec

from schedtrace.workloads.rows import Row, json_rows, token_count, unreadable_row

FAILED = "failed"
"""Key that counts requests that failed or were cancelled, which are left out."""


class ServeResult(msgspec.Struct):
    """Result of ``vllm bench serve --save-detailed``."""

    input_lens: list[float]
    output_lens: list[float]
    start_times: list[float] = []


def serve_has_times(path: Path) -> bool:
    """Return whether a result of ``vllm bench serve`` has the times at which requests were sent."""
    return all(result.start_times for _, result in json_rows(path, ServeResult))


def serve_rows(path: Path, counts: Counter[str]) -> Iterator[Row]:
    """Yield the requests in a result of ``vllm bench serve``; requests without output failed."""
    for place, (number, result) in enumerate(json_rows(path, ServeResult)):
        if place:
            raise unreadable_row(path, number, "a second result: keep the one whose requests are to be sent")
        times = result.start_times or [0.0] * len(result.input_lens)
        if not len(times) == len(result.input_lens) == len(result.output_lens):
            raise unreadable_row(path, number, "input_lens, output_lens and start_times differ in length")
        requests = zip(times, result.input_lens, result.output_lens, strict=True)
        for at_s, prompt, output in sorted(requests, key=itemgetter(0)):
            if not output:
                counts[FAILED] += 1
                continue
            yield Row(
                line=number,
                prompt_tokens=token_count(path, number, "input_lens", prompt),
                output_tokens=token_count(path, number, "output_lens", output),
                at_us=at_s * 1e6 if result.start_times else None,
            )


class SequenceLength(msgspec.Struct):
    """Figure of a request, with its unit."""

    value: float
    unit: str


class SequenceLengths(msgspec.Struct):
    """Figures of a request in AIPerf's export that are used here."""

    input_sequence_length: SequenceLength | None = None
    output_sequence_length: SequenceLength | None = None


class Metadata(msgspec.Struct):
    """Metadata of a request in AIPerf's export that are used here."""

    request_start_ns: float
    was_cancelled: bool = False


class ExportedRequest(msgspec.Struct):
    """Line of AIPerf's ``profile_export.jsonl``."""

    metadata: Metadata
    metrics: SequenceLengths | None = None


def aiperf_rows(path: Path, counts: Counter[str]) -> Iterator[Row]:
    """Yield the requests of AIPerf's export, in the order in which they were sent."""
    requests = sorted(json_rows(path, ExportedRequest), key=lambda pair: pair[1].metadata.request_start_ns)
    for number, row in requests:
        metrics = row.metrics or SequenceLengths()
        prompt, output = metrics.input_sequence_length, metrics.output_sequence_length
        if prompt is None or output is None or row.metadata.was_cancelled:
            counts[FAILED] += 1
            continue
        if {prompt.unit, output.unit} != {"tokens"}:
            raise unreadable_row(path, number, "sequence lengths are not in tokens")
        yield Row(
            line=number,
            prompt_tokens=token_count(path, number, "input_sequence_length", prompt.value),
            output_tokens=token_count(path, number, "output_sequence_length", output.value),
            at_us=row.metadata.request_start_ns / 1e3,
        )
