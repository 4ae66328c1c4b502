"""Reads topic `rollouts` into the collector, from where the checkpoint stood, in a thread.

What the topic holds when an attempt begins is taken first: only then may the scheduler dispatch what is missing. What a
process of an earlier attempt writes later is told apart by its offset.
"""

import logging
from collections.abc import Mapping

from streamrl.kafka.connection import Connection
from streamrl.kafka.positions import topic_extent, usable_positions
from streamrl.kafka.reader import ReaderThread, RecordReader
from trainer_svc.collector import Collector

logger = logging.getLogger(__name__)

_BROKER_ANSWERS_S = 60.0
_SILENCE_S = 30.0
"""Records that a broker counts and does not show are not waited for any longer. They are taken whenever they come."""


class RolloutIntake:
    """One reader over all partitions."""

    def __init__(
        self,
        connection: Connection,
        topic: str,
        num_partitions: int,
        collector: Collector,
        *,
        saved_topic_id: str = "",
        saved_positions: Mapping[int, int] | None = None,
    ) -> None:
        """
        Args:
            saved_topic_id, saved_positions: of a checkpoint that this run continues.
        """
        self._connection = connection
        self._topic = topic
        self._num_partitions = num_partitions
        self._collector = collector
        self._saved_topic_id = saved_topic_id
        self._saved_positions = saved_positions or {}
        self._thread: ReaderThread | None = None
        self.topic_id = ""
        """Of the topic that is read; empty before the start."""

    def start(self) -> None:
        """Begins to read; returns when everything that was there has been taken. The batches that are under way must be
        open.

        Raises:
            BrokerUnavailableError: the broker does not answer.
        """
        extent = topic_extent(self._connection, self._topic, self._num_partitions, _BROKER_ANSWERS_S)
        positions = usable_positions(extent, self._saved_topic_id, self._saved_positions)
        there = {partition: end for partition, end in extent.end.items() if end > extent.first[partition]}
        if self._saved_positions and any(position is None for position in positions.values()):
            logger.info("%s is not the topic that the checkpoint read, or not whole: read from its start", self._topic)
        self.topic_id = extent.topic_id
        self._collector.begin(positions, there)
        reader = RecordReader(self._connection, self._topic, positions)
        self._thread = ReaderThread(reader, self._collector.on_records, self._collector.fail).start()
        if not self._collector.wait_read(there, _SILENCE_S):
            logger.warning(
                "the broker shows nothing more of %s for %.0f s: what is missing is generated again",
                self._topic,
                _SILENCE_S,
            )
        reused, forgotten = self._collector.reused_and_forgotten()
        if there:
            logger.info("%s: %d rollouts are reused, %d are of forgotten versions", self._topic, reused, forgotten)

    def close(self) -> None:
        """Ends the thread and the reader."""
        if self._thread is not None:
            self._thread.close()
