"""What must outlive a restart beside the versions: the highest attempt seen, and the traffic so far."""

import json
import logging
from pathlib import Path

from streamrl.errors import StaleAttemptError
from streamrl.whole_file import replace_file

logger = logging.getLogger(__name__)

_NAMES = ("attempt", "bytes_full", "bytes_sent")


class Ledger:
    """Kept in one small JSON file that is replaced as a whole."""

    def __init__(self, path: Path, attempt: int) -> None:
        """
        Args:
            attempt: the run's attempt as this service was told; the higher of it and the file's counts.
        """
        self._path = path
        kept = self._read()
        self.attempt: int = max(attempt, kept.get("attempt", 0))
        self.bytes_full: int = kept.get("bytes_full", 0)
        self.bytes_sent: int = kept.get("bytes_sent", 0)
        self._num_stale = 0
        self.save()

    def _read(self) -> dict[str, int]:
        """What the file says; of one that is damaged nothing is known but what this service was told."""
        try:
            kept = json.loads(self._path.read_text())
            if not all(isinstance(kept[name], int) for name in _NAMES):
                raise ValueError(f"expected whole numbers, got {kept}")
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("%s is damaged (%s): traffic is counted from 0 again", self._path, error)
            return {}
        return {name: kept[name] for name in _NAMES}

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
        replace_file(self._path, json.dumps({name: getattr(self, name) for name in _NAMES}))
