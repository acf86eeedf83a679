"""timing.Cuda for tests without a GPU."""

import time


class HostClock:
    """Cuda's interface on a CPU, one round."""

    def medians(self, calls):
        times = {}
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name] = time.perf_counter() - start
        return times
