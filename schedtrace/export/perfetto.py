"""Traces for ``ui.perfetto.dev`` in Perfetto's protobuf, written with Perfetto's own package."""

from pathlib import Path
from typing import IO

import polars as pl
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from schedtrace.export.scene import (
    REQUESTS,
    Facts,
    Preempted,
    ProcessTracks,
    TraceClock,
    clock_of,
    process_tracks,
)
from schedtrace.model import safe_files
from schedtrace.read.run import Run

_SEQUENCE = 1
"""Number of the only packet sequence; within it, packets with equal times keep their order in the file."""
_CHUNK = 10_000
"""Number of packets that are written together."""
_PROCESS_BITS, _SERIES_BITS, _GROUPS = 40, 36, 1 << 32
"""Layout of track ids: the process from bit 40 on, a counter's series from bit 36 on, groups from 2^32 on,
other tracks below."""


def write_perfetto(run: Run, file: Path) -> int:
    """Write a run; return the number of events: slices, marks and values of counters.

    Timestamps are ``CLOCK_REALTIME``; a snapshot of the clocks at the beginning also contains
    ``CLOCK_MONOTONIC`` and the time of a torch profile (``TraceClock.torch_base_ns``).
    """
    with safe_files.writable(file) as target:
        writer = _Writer(target, clock_of(run.traces[0].header))
        for process in process_tracks(run):
            writer.process(process)
    return writer.events


class _Writer:
    def __init__(self, target: IO[bytes], clock: TraceClock) -> None:
        self._target = target
        self._clock = clock
        self._chunk = pb.Trace()
        self._fact_names: dict[str, int] = {}
        self._flows = 0
        self.events = 0
        # The sequence begins with the clocks. A torch profile contains none, so a viewer that shows it beside
        # this trace reads the times of both on one scale. This trace's times must therefore count from the
        # profile's origin.
        readings = {
            pb.BUILTIN_CLOCK_REALTIME: clock.wall_ns,
            pb.BUILTIN_CLOCK_MONOTONIC: clock.monotonic_ns,
            pb.BUILTIN_CLOCK_TRACE_FILE: clock.wall_ns - clock.torch_base_ns,
        }
        packet = self._packet()
        packet.sequence_flags |= pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        packet.trace_packet_defaults.timestamp_clock_id = pb.BUILTIN_CLOCK_REALTIME
        packet.clock_snapshot.primary_trace_clock = pb.BUILTIN_CLOCK_TRACE_FILE
        for clock_id, ns in readings.items():
            if ns is not None:
                packet.clock_snapshot.clocks.add(clock_id=clock_id, timestamp=ns)

    def write_chunk(self) -> None:
        """Write the collected packets; concatenated traces form one trace."""
        self._target.write(self._chunk.SerializeToString())
        self._chunk = pb.Trace()

    def process(self, process: ProcessTracks) -> None:
        """Write all tracks of an engine."""
        whole = process.number << _PROCESS_BITS
        described = pb.ProcessDescriptor(
            pid=process.number, process_name=process.name, process_labels=process.labels
        )
        self._track(pb.TrackDescriptor(uuid=whole, process=described))
        # A viewer sorts what stands directly under a process by name.
        root = whole + _GROUPS
        self._track(pb.TrackDescriptor(uuid=root, name="scheduler", parent_uuid=whole))
        groups = {name: root + place for place, name in enumerate((*process.counters, REQUESTS), 1)}
        for rank, (name, uuid) in enumerate(groups.items(), len(process.tracks)):
            self._track(pb.TrackDescriptor(uuid=uuid, name=name, parent_uuid=root, sibling_order_rank=rank))
        for track in process.tracks:
            parent = root if track.group is None else groups[track.group]
            uuid = whole + track.number
            self._track(
                pb.TrackDescriptor(
                    uuid=uuid, name=track.name, parent_uuid=parent, sibling_order_rank=track.number
                )
            )
            for span in track.slices():
                self._event(span.begin_us, uuid, pb.TrackEvent.TYPE_SLICE_BEGIN, span.name, span.facts)
                self._event(span.end_us, uuid, pb.TrackEvent.TYPE_SLICE_END)
                self.events += 1
        for name, values in process.counters.items():
            self._counter(groups[name], values)
        for preempted in process.preemptions:
            self._preempted(whole, preempted)
        self.write_chunk()

    def _track(self, track: pb.TrackDescriptor) -> None:
        """Write a track; its children are listed in the order of their ranks."""
        track.child_ordering = pb.TrackDescriptor.EXPLICIT
        self._packet().track_descriptor.MergeFrom(track)

    def _counter(self, group: int, values: pl.DataFrame) -> None:
        """Write a track for each series, leaving out values that the record lacks."""
        for place, series in enumerate(values.columns[1:], 1):
            uuid = group + (place << _SERIES_BITS)
            counter = pb.CounterDescriptor()
            self._track(
                pb.TrackDescriptor(
                    uuid=uuid, name=series, parent_uuid=group, sibling_order_rank=place, counter=counter
                )
            )
            for us, value in values.select("us", series).drop_nulls().iter_rows():
                self._event(us, uuid, pb.TrackEvent.TYPE_COUNTER).counter_value = value
                self.events += 1

    def _preempted(self, whole: int, preemption: Preempted) -> None:
        """Mark both tracks and join the marks by an arrow, whose origin is written first."""
        mark = pb.TrackEvent.TYPE_INSTANT
        if preemption.preempter is not None:
            self._flows += 1
            origin = self._event(
                preemption.us, whole + preemption.preempter, mark, "preempts", preemption.facts
            )
            origin.flow_ids.append(self._flows)
            self.events += 1
        victim = self._event(preemption.us, whole + preemption.victim, mark, "preempted", preemption.facts)
        if preemption.preempter is not None:
            victim.terminating_flow_ids.append(self._flows)
        self.events += 1

    def _event(
        self, us: int, track: int, kind: int, name: str | None = None, facts: Facts | None = None
    ) -> pb.TrackEvent:
        packet = self._packet()
        packet.timestamp = self._clock.ns(us)
        event = packet.track_event
        event.type, event.track_uuid = kind, track
        if name is not None:
            event.name = name
        for key, value in (facts or {}).items():
            if key not in self._fact_names:
                self._fact_names[key] = len(self._fact_names) + 1
                packet.interned_data.debug_annotation_names.add(iid=self._fact_names[key], name=key)
            note = event.debug_annotations.add(name_iid=self._fact_names[key])
            if isinstance(value, str):
                note.string_value = value
            else:
                note.int_value = value
        return event

    def _packet(self) -> pb.TracePacket:
        """Append a new empty packet to the trace, and return it."""
        if len(self._chunk.packet) >= _CHUNK:
            self.write_chunk()
        packet = self._chunk.packet.add()
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.sequence_flags = pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        return packet
