"""Seeds of torch's generators that are functions of a key."""

import numpy as np


def keyed_seed(*key: int) -> int:
    """A seed, below 2**63, for numbers that are not negative."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)
