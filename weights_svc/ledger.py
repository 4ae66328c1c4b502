"""What must outlive a restart beside the versions: the highest attempt seen, and the traffic so far."""

import json
import logging
from pathlib import Path

from streamrl.errors import StaleAttemptError

logger = logging.getLogger(__name__)


class Ledger:
    """Kept in one small JSON file that is replaced as a whole."""

    def __init__(self, path: Path, attempt: int) -> None:
        """
        Args:
            attempt: the run's attempt as this service was told; the higher of it and the file's counts.
        """
        self._path = path
        kept = json.loads(path.read_text()) if path.exists() else {}
        self.attempt: int = max(attempt, kept.get("attempt", 0))
        self.bytes_full: int = kept.get("bytes_full", 0)
        self.bytes_sent: int = kept.get("bytes_sent", 0)
        self._num_stale = 0
        self.save()

    def check(self, attempt: int) -> None:
        """
        Raises:
            StaleAttemptError: a higher attempt has been seen.
        """
        if attempt < self.attempt:
            self._num_stale += 1
            raise StaleAttemptError(
                f"attempt {attempt} is over: the run is at attempt {self.attempt} "
                f"({self._num_stale} such calls so far)",
                self.attempt,
            )

    def raise_attempt(self, attempt: int) -> None:
        """As `check`, and remembers a higher attempt. Only the trainer's calls raise it.

        Raises:
            StaleAttemptError: a higher attempt has been seen.
        """
        self.check(attempt)
        if attempt > self.attempt:
            self.attempt = attempt
            self.save()

    def count_traffic(self, *, bytes_full: int, bytes_sent: int) -> None:
        """Counts what a fetch would be in full and what it sends; kept at the next `save_traffic`."""
        self.bytes_full += bytes_full
        self.bytes_sent += bytes_sent

    def save_traffic(self) -> None:
        """As `save`, but a disk that cannot take it costs no more than the counters of a restarted service."""
        try:
            self.save()
        except OSError as error:
            logger.warning("traffic is not kept: %s", error)

    def save(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_text(
            json.dumps({"attempt": self.attempt, "bytes_full": self.bytes_full, "bytes_sent": self.bytes_sent})
        )
        partial.replace(self._path)
