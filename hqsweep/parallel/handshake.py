"""What all ranks of a run have to agree in before its first step: recipe, seed, data, versions."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping

from hqsweep.errors import UserError
from hqsweep.parallel.mesh import Ranks


class Disagreement(UserError):
    """Ranks of a run differ in what they are to do; every rank raises the same sentence."""


def agree(ranks: Ranks, facts: Mapping[str, object]) -> None:
    """Raises Disagreement on all ranks where one has other facts, naming the first such fact and the ranks. A
    collective. facts: name -> JSON value, the same names in the same order on all ranks; hashes of them travel."""
    own = {
        name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest() for name, value in facts.items()
    }
    every = ranks.gather(own)
    for name in facts:
        found = [theirs.get(name, "missing") for theirs in every]
        if len(set(found)) > 1:
            raise Disagreement(_sentence(name, found))


def _sentence(name: str, found: list[str]) -> str:
    common = Counter(found).most_common(1)[0][0]
    odd = [rank for rank, value in enumerate(found) if value != common]
    listed = ", ".join(map(str, odd[:8])) + (f" and {len(odd) - 8} more" if len(odd) > 8 else "")
    which = f"ranks {listed} have" if len(odd) > 1 else f"rank {listed} has"
    return (
        f"train.parallel: the ranks disagree in {name}: {which} {found[odd[0]][:10]}, the others {common[:10]}"
        " (hashes); give all nodes the same package, config and data"
    )
