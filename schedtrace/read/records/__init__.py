"""Readers of records that contain less than a trace, one module per kind.

A new kind needs a module with a ``READER``, an entry in ``READERS``, rules in ``diagnose/records`` for
its contents, and samples with a test.
"""

from schedtrace.read.file_sample import RecordReader
from schedtrace.read.records import benchmark_result, metrics, vllm_log

READERS: tuple[RecordReader, ...] = (vllm_log.READER, metrics.READER, benchmark_result.READER)
