"""Several machines for one run: their meeting place is a store that the first one serves, through which it tells the
others what to launch, and each tells all why its ranks ended."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

LOOK_S = 0.5
"""Seconds between two looks at the store."""
COME_S = 300
"""Seconds in which the first machine has to serve the store."""
LAUNCHES = "hqsweep/launches"


class Meeting:
    """A client of the store, or with `serves` the store itself, at HOST:PORT."""

    def __init__(self, endpoint: str, *, serves: bool = False) -> None:
        from torch.distributed import TCPStore

        host, _, port = endpoint.rpartition(":")
        wait = timedelta(seconds=COME_S)
        self.endpoint = endpoint
        self._store = TCPStore(host, int(port), None, serves, timeout=wait, wait_for_workers=False)

    def announce(self, key: str, command: Sequence[str]) -> None:
        """Tell the other machines to launch the command under this key."""
        number = self._store.add(LAUNCHES, 1)
        self._store.set(f"{LAUNCHES}/{number}", json.dumps({"key": key, "command": list(command)}))

    def finish(self) -> None:
        """Tell the other machines that nothing more will come."""
        self.announce("", ())

    def announced(self) -> Iterator[dict[str, Any]]:
        """{"key", "command"} of each launch, as they come, until there are no more. Raises torch's DistNetworkError
        when the store is gone."""
        number = 1
        while True:
            while not self._store.check([f"{LAUNCHES}/{number}"]):
                time.sleep(LOOK_S)
            launch = json.loads(self._store.get(f"{LAUNCHES}/{number}"))
            if not launch["key"]:
                return
            yield launch
            number += 1

    def end(self, key: str, reason: str) -> None:
        """Say why the ranks of this machine ended, unless another one has said so; "" for ranks that finished."""
        self._store.compare_set(f"{key}/end", "", reason or "finished")

    def reason(self, key: str) -> str | None:
        """Why the ranks of a machine ended early; None while none did."""
        if not self._store.check([f"{key}/end"]):
            return None
        said = self._store.get(f"{key}/end").decode()
        return None if said == "finished" else said

    @contextmanager
    def watched(self, key: str) -> Iterator[None]:
        """SIGTERM to this process as soon as the ranks of another machine have ended early."""
        over = threading.Event()
        other = Meeting(self.endpoint)  # a client is for one thread

        def watch() -> None:
            while not over.wait(LOOK_S):
                if other.reason(key) is not None:
                    os.kill(os.getpid(), signal.SIGTERM)
                    return

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def free_endpoint(host: str) -> str:
    """HOST:PORT with a port that is free on this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{host}:{probe.getsockname()[1]}"
