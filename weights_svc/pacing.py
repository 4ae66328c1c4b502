"""A limit on bytes a second: a pure function of the time at which bytes came."""


class Pacer:
    """Lets a burst of a quarter of a second through, and no more than the rate over any longer time."""

    def __init__(self, max_bytes_per_s: float) -> None:
        """
        Args:
            max_bytes_per_s: 0: no limit.
        """
        self._rate = max_bytes_per_s
        self._paid_until_s = float("-inf")

    def pause_s(self, num_bytes: int, now_s: float) -> float:
        """How long to wait before more may come.

        Args:
            num_bytes: what has come now.
        """
        if self._rate <= 0:
            return 0.0
        self._paid_until_s = max(self._paid_until_s, now_s - _BURST_S) + num_bytes / self._rate
        return max(self._paid_until_s - now_s, 0.0)


_BURST_S = 0.25
