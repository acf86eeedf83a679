"""What all ranks of a run have to agree on before its first step: recipe, seed, data, versions."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping

from hqsweep.errors import UserError
from hqsweep.parallel.mesh import Ranks


class Disagreement(UserError):
    """Ranks of a run differ in what they are to do; every rank raises the same sentence."""


def agree(ranks: Ranks, values: Mapping[str, object]) -> None:
    """Raise Disagreement on all ranks where the ranks' values differ; it names the first such value and the ranks. A
    collective. values: name -> JSON value, the same names in the same order on all ranks; hashes of them travel."""
    own = {
        name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest() for name, value in values.items()
    }
    every = ranks.gather(own)
    for name in values:
        digests = [theirs.get(name, "missing") for theirs in every]
        if len(set(digests)) > 1:
            raise Disagreement(_sentence(name, digests))


def _sentence(name: str, digests: list[str]) -> str:
    common = Counter(digests).most_common(1)[0][0]
    odd = [rank for rank, value in enumerate(digests) if value != common]
    listed = ", ".join(map(str, odd[:8])) + (f" and {len(odd) - 8} more" if len(odd) > 8 else "")
    which = f"ranks {listed} have" if len(odd) > 1 else f"rank {listed} has"
    return (
        f"train.parallel: the ranks disagree in {name}: {which} {digests[odd[0]][:10]}, the others {common[:10]}"
        " (hashes); give all nodes the same package, config and data"
    )
