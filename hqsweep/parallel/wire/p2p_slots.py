"""Which slots of a mailbox are free (p2p_copy): from the order in which exchanges begin and are waited for, which all
ranks have alike, and without a message about it."""

from collections import deque
from dataclasses import dataclass


@dataclass(eq=False)
class Exchange:
    slot: int
    begun: int
    """The number of exchanges that had begun before."""
    waited: bool = False
    """Whether this rank has waited for it, and so knows that the others had begun it."""
    read: int | None = None
    """The number of exchanges that had begun when all its reads were enqueued."""
    kept: bool = False
    """Whether it will be read after others have begun."""


class Slots:
    """Which slots are free, from the order in which exchanges begin and are waited for, which all ranks have alike."""

    def __init__(self, count: int) -> None:
        self.last: list[Exchange | None] = [None] * count
        self.recent: deque[Exchange] = deque(maxlen=2 * count)
        self.begun = 0

    def take(self) -> Exchange | None:
        """A new exchange in a free slot; None where none is known to be free. Ranks signal that its messages have come
        behind all reads of those that were waited for before."""
        for each in self.last:
            if each is not None and each.waited and each.read is None and not each.kept:
                each.read = self.begun
        slot = next((slot for slot, last in enumerate(self.last) if last is None or self._is_free(last)), None)
        if slot is None:
            return None
        exchange = Exchange(slot, self.begun)
        self.last[slot] = exchange
        self.recent.append(exchange)
        self.begun += 1
        return exchange

    def _is_free(self, last: Exchange) -> bool:
        """Whether the others have enqueued their reads of it before they began one that this rank has waited for."""
        read = last.read
        return read is not None and any(each.waited and each.begun >= read for each in self.recent)

    def settle(self, reading: Exchange | None = None) -> None:
        """Note that the others have done all that they had enqueued, as a barrier shows; not yet the reads of exchanges
        that are kept, and, if there is such a one, of another that was waited for."""

        def stays(last: Exchange) -> bool:
            return not last.waited or last.kept or last is reading

        self.last = [last if last is not None and stays(last) else None for last in self.last]

    def clear(self) -> None:
        """Forget exchanges that nobody will wait for, as those of a capture that failed, too."""
        self.last = [None] * len(self.last)
        self.recent.clear()
