"""How often and how fast a process that died is started again."""

from __future__ import annotations

from collections import deque

_FIRST_DELAY_S = 0.25
_MAX_DELAY_S = 10.0
_WINDOW_S = 300.0
_MAX_DEATHS_IN_WINDOW = 6


class RestartPolicy:
    """Doubling delays, and an end: six deaths within five minutes are no accident."""

    def __init__(self) -> None:
        self._deaths_s: deque[float] = deque(maxlen=_MAX_DEATHS_IN_WINDOW)

    def delay_after_death(self, now_s: float) -> float | None:
        """Seconds to wait before the next start; None gives up.

        Args:
            now_s: monotonic time of the death.
        """
        while self._deaths_s and now_s - self._deaths_s[0] > _WINDOW_S:
            self._deaths_s.popleft()
        self._deaths_s.append(now_s)
        if len(self._deaths_s) == _MAX_DEATHS_IN_WINDOW:
            return None
        return float(min(_MAX_DELAY_S, _FIRST_DELAY_S * 2 ** (len(self._deaths_s) - 1)))
