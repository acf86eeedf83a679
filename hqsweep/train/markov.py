"""A source of tokens whose loss floor is known exactly: a random order-k Markov chain.

The next token depends on the last `order` tokens through one row of probabilities per context, each row drawn from a
symmetric Dirichlet distribution. No model can have a lower expected loss than the chain's entropy rate, and order 2
or more needs attention and MLP to reach it (an order-1 chain is solved by the embedding and the head alone, which
recipes leave in high precision).
"""

from dataclasses import dataclass

import numpy as np

from hqsweep.errors import UserError

MAX_ENTRIES = 1 << 24  # of the transition table
BURN_IN = 64  # tokens until a chain has forgotten its start


@dataclass(frozen=True, kw_only=True)
class MarkovSource:
    """An order-k chain over V tokens. `rows`: [V**k, V] float64, the next-token probabilities of every context.

    Context number: sum_i token[i] * V**(k-1-i), the oldest token being the most significant digit.
    """

    rows: np.ndarray

    @classmethod
    def draw(cls, *, vocab: int, order: int, concentration: float, seed: int) -> "MarkovSource":
        """Rows from Dirichlet(concentration, ..., concentration); small concentrations make predictable text.

        Raises:
            UserError: the table would exceed 2**24 entries.
        """
        if vocab ** (order + 1) > MAX_ENTRIES:
            raise UserError(
                f"data.markov: vocab {vocab} with order {order} needs {vocab ** (order + 1)} probabilities;"
                f" at most {MAX_ENTRIES} are allowed; lower vocab or order"
            )
        rng = np.random.Generator(np.random.Philox([seed, 0]))
        return cls(rows=rng.dirichlet(np.full(vocab, concentration), size=vocab**order))

    @property
    def vocab(self) -> int:
        return self.rows.shape[1]

    def stationary(self) -> np.ndarray:
        """Probability of every context in the long run, [V**k] float64, to 1e-13 in L1, by power iteration.

        The iterated chain is the lazy one, (P + I) / 2: the same limit, and periodic chains converge too.
        """
        contexts, vocab = self.rows.shape
        step = self.rows.reshape(vocab, contexts // vocab, vocab)
        pi = np.full(contexts, 1 / contexts)
        for _ in range(100_000):
            # the oldest token a leaves the context, the new token c enters: (a, rest) -> (rest, c)
            after = np.einsum("ar,arc->rc", pi.reshape(vocab, -1), step).reshape(-1)
            if np.abs(after - pi).sum() < 1e-13:
                break
            pi = (pi + after) / 2
        return pi

    def entropy_rate(self) -> float:
        """H = -sum_s pi[s] sum_t P[s, t] ln P[s, t], in nats per token; 0 ln 0 = 0."""
        logs = np.log(self.rows, out=np.zeros_like(self.rows), where=self.rows > 0)
        return float(-(self.stationary() @ (self.rows * logs).sum(axis=1)))

    def sample(self, length: int, seed: int) -> np.ndarray:
        """One chain of `length` tokens, uint8 up to 256 tokens, else uint16; the same for the same seed.

        The chain is cut into pieces that run side by side, piece i from the end of piece i-1. The ends are guessed
        first; a piece whose start turns out wrong runs again with the same random numbers. Two chains fed with the
        same numbers soon meet, so a few rounds suffice, and the result is exactly the chain run from end to end.
        """
        total = length + BURN_IN
        pieces = max(1, round(total**0.5))
        steps = -(-total // pieces)
        uniforms = np.random.Generator(np.random.Philox([seed, 1])).random((pieces, steps))
        starts = np.zeros(pieces, np.int64)
        out = np.empty((pieces, steps), np.uint8 if self.vocab <= 256 else np.uint16)
        ends = np.zeros(pieces, np.int64)
        stale = np.arange(pieces)
        thresholds = self._thresholds()
        while stale.size:
            out[stale], ends[stale] = self._run(thresholds, starts[stale], uniforms[stale])
            stale = 1 + np.flatnonzero(starts[1:] != ends[:-1])
            starts[stale] = ends[stale - 1]
        return out.reshape(-1)[BURN_IN:total]

    def _thresholds(self) -> np.ndarray:
        """s + P(token <= t | context s) for every context s and t < V-1: one sorted array, so one search per token."""
        below = np.minimum(self.rows.cumsum(axis=1)[:, :-1], 1)
        return (np.arange(len(below))[:, None] + below).reshape(-1)

    def _run(self, thresholds: np.ndarray, contexts: np.ndarray, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Chains side by side: contexts [n] and a number in [0, 1) per token [n, steps] -> tokens, last contexts."""
        tokens = np.empty(uniforms.shape[::-1], np.int64)
        for step, u in enumerate(np.ascontiguousarray(uniforms.T)):
            places = np.searchsorted(thresholds, contexts + u, side="right")
            # the minimum: contexts + u can round up to the next context's first threshold
            tokens[step] = np.minimum(places - contexts * (self.vocab - 1), self.vocab - 1)
            contexts = (contexts * self.vocab + tokens[step]) % len(self.rows)
        return tokens.T, contexts
