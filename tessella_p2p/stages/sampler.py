"""Drawing tokens from logits: pure, and repeatable from the tokens before it, the seed and the position alone.

No generator has a state, so a draw does not depend on the batch that it ran in or on the node; a route that is rebuilt in the middle of
an answer goes on with the same tokens, and an auditor repeats a single draw.

The order, with its sources:

0. Tokens that the grammar does not allow next become impossible: no bias or temperature brings them back.
1. ``logit_bias`` is added (OpenAI; first in vLLM and in llama.cpp's chain too).
2. Repetition penalty, over prompt and answer: a positive logit is divided by it, any other multiplied (CTRL, Keskar et al. 2019, as
   transformers' ``RepetitionPenaltyLogitsProcessor``).
3. ``frequency_penalty · count + presence_penalty`` is subtracted, over the answer alone (OpenAI; placed as in vLLM).
4. Temperature 0 takes the largest; else the logits are divided by it.
5. Top-k, then top-p, then min-p, each over what the one before left: transformers' order of warpers. Equal logits: the lowest id first.
6. The cumulative distribution of what is left, in the order of ids, is inverted at `uniform_at` (seed, position).

Logprobs are the model's own: the log-softmax of its logits before step 1, whatever is done to them afterwards, as OpenAI's, vLLM's
``raw_logprobs`` and llama.cpp's are.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tessella_p2p.base.errors import InvalidRequest
from tessella_p2p.model.grammar import Constraint
from tessella_p2p.stages.engine import Sampled, TokenLogprob
from tessella_p2p.stages.opening import Opening
from tessella_p2p.wire.messages import ChainOpen, Sampling

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

LEAST_LOGPROB = -9999.0
"""What a logprob is at least: OpenAI's word for "very unlikely"; so each one is a number that JSON can say."""
_FIRST_LOOK = 4096
"""How many of the likeliest tokens top-p sorts at first: nearly always enough, and far cheaper than the whole vocabulary."""
_DRAW_DOMAIN = b"tessella draw"


def uniform_at(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to (seed, position): 53 bits of BLAKE2b keyed with the seed, over the position."""
    digest = hashlib.blake2b(
        position.to_bytes(8, "little"), key=seed.to_bytes(8, "little"), digest_size=8, person=_DRAW_DOMAIN
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Sampler:
    """The draws of one session; implements `engine.TokenSampler`.

    It learns the tokens of the answer by drawing them. A draw at a position that was drawn before forgets what came from there on, so
    that it gives the same token again.

    Args:
        params: how to draw.
        logprobs: whether a draw tells its token's log-probability, and those of the ``num_top`` likeliest.
        prompt: token ids of the prompt, in any order, where the repetition penalty counts them.
        answer: the answer before the first draw, where a penalty counts it: a session that is resumed goes on as if it never stopped.
        constraint: of the grammar, where there is one, behind ``answer``; it belongs to this from now on.
    """

    def __init__(
        self,
        params: Sampling,
        prompt: Sequence[int] = (),
        answer: Sequence[int] = (),
        *,
        logprobs: bool = False,
        constraint: Constraint | None = None,
    ) -> None:
        if (params.grammar is None) != (constraint is None):
            raise ValueError("a grammar and its constraint come together")
        self.params = params
        self._logprobs = logprobs
        self._constraint = constraint
        self._prompt: Ids = np.unique(np.array(prompt if params.counts_prompt else (), np.int64))
        self._counts: Counter[int] = Counter(answer if params.counts_answer else ())
        self._drawn: list[tuple[int, int]] = []  # (position, token), rising
        self._biased: Ids = np.array([token for token, _ in params.logit_bias], np.int64)
        self._biases: Floats = np.array([bias for _, bias in params.logit_bias], np.float64)
        self._is_plain = not (params.counts_answer or params.logit_bias)

    def draw(self, logits: npt.NDArray[np.float32], position: int) -> Sampled | InvalidRequest:
        """See `engine.TokenSampler.draw`. The error is the grammar's: it takes too much, or leaves nothing to draw.

        Raises:
            IndexError: a token of the prompt, the answer or the bias is out of the vocabulary; `sampler_for` has checked that.
        """
        try:
            return self._drawn_at(logits, position)
        except InvalidRequest as error:
            return error

    def _drawn_at(self, logits: npt.NDArray[np.float32], position: int) -> Sampled:
        params = self.params
        self._rewind(position)
        if self._is_plain and params.temperature == 0.0:
            token = int(np.argmax(logits))
        else:
            shifted = logits if self._is_plain else self._shifted(logits)
            token = int(np.argmax(shifted)) if params.temperature == 0.0 else self._drawn_from(shifted, position)
        if self._constraint is not None:
            self._constraint.accept(token)
        if params.counts_answer:
            self._drawn.append((position, token))
            self._counts[token] += 1
        return _with_logprobs(logits, token, params.num_top) if self._logprobs else Sampled(token)

    def _rewind(self, position: int) -> None:
        num_before = len(self._drawn)
        while self._drawn and self._drawn[-1][0] >= position:
            _, token = self._drawn.pop()
            self._counts[token] -= 1
            if not self._counts[token]:
                del self._counts[token]
        if self._constraint is not None:
            self._constraint.take_back(num_before - len(self._drawn))

    def _shifted(self, logits: npt.NDArray[np.float32]) -> Floats:
        """The logits with bias and penalties, [vocabulary] float64: −inf of what the grammar does not allow, else finite."""
        params = self.params
        shifted = logits.astype(np.float64)
        if self._constraint is not None:
            shifted[~self._constraint.allowed(len(shifted))] = -np.inf
        shifted[self._biased] += self._biases
        if not params.counts_answer:
            return shifted
        answer: Ids = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
        if params.repetition_penalty != 1.0:
            is_there = np.zeros(len(shifted), np.bool_)
            is_there[self._prompt] = is_there[answer] = True
            seen = shifted[is_there]
            shifted[is_there] = np.where(seen > 0.0, seen / params.repetition_penalty, seen * params.repetition_penalty)
        counts = np.fromiter(self._counts.values(), np.float64, len(self._counts))
        shifted[answer] -= params.frequency_penalty * counts + params.presence_penalty
        return shifted

    def _drawn_from(self, shifted: npt.NDArray[np.floating], position: int) -> int:
        params = self.params
        ids: Ids | None = None  # None: all of them
        kept = shifted
        if self._constraint is not None:  # few are left, and sorting many equal ones is slow
            ids = np.flatnonzero(shifted > -np.inf)
            kept = shifted[ids]
        if 0 < params.top_k < len(kept):
            chosen = _largest(kept, params.top_k)
            ids, kept = chosen if ids is None else ids[chosen], kept[chosen]
        weights = kept.astype(np.float64)
        # The largest becomes 0 before the division, so that no temperature, however small, gives inf − inf.
        with np.errstate(over="ignore"):
            np.exp((weights - weights.max()) / params.temperature, out=weights)
        if params.top_p < 1.0:
            chosen = _nucleus(weights, params.top_p)
            ids, weights = chosen if ids is None else ids[chosen], weights[chosen]
        if params.min_p > 0.0:
            chosen = np.flatnonzero(weights >= params.min_p)  # the largest weight is 1
            ids, weights = chosen if ids is None else ids[chosen], weights[chosen]
        cumulative = np.cumsum(weights)
        # u·total < total, so the index is at most the last one with a positive weight.
        index = int(np.searchsorted(cumulative, uniform_at(params.seed, position) * cumulative[-1], side="right"))
        return index if ids is None else int(ids[index])


def sampler_for(opening: Opening, vocabulary: int, constraint: Constraint | None = None) -> Sampler:
    """What a tail draws the tokens of a session with, from its verified chain-open.

    Raises:
        InvalidRequest: a biased token, or one of the history, is out of the vocabulary; the entry is at fault.
    """
    try:
        return sampler_of(opening.body, vocabulary, constraint)
    except InvalidRequest as error:
        raise error.blame(opening.entry) from None


def answer_of(body: ChainOpen) -> list[int]:
    """The answer before an epoch, as far as a draw depends on it."""
    history = np.frombuffer(body.history, "<u4")
    return [int(token) for token in history[len(history) - body.history_answer :]]


def sampler_of(body: ChainOpen, vocabulary: int, constraint: Constraint | None = None) -> Sampler:
    """What the tokens of a session are drawn with, from the beginning of its epoch on: by its tail, and by an auditor.

    Args:
        constraint: of the grammar of ``body``, behind its `answer_of`; there where there is a grammar.

    Raises:
        InvalidRequest: a biased token, or one of the history, is out of the vocabulary.
    """
    history = np.frombuffer(body.history, "<u4")
    named = [*(token for token, _ in body.sampling.logit_bias), int(history.max(initial=0))]
    if max(named) >= vocabulary:
        raise InvalidRequest(f"token {max(named)} of the bias or the history is out of the vocabulary of {vocabulary}")
    prompt = history[: len(history) - body.history_answer].tolist()
    logprobs = body.output == "logprobs"
    return Sampler(body.sampling, prompt, answer_of(body), logprobs=logprobs, constraint=constraint)


def _largest(values: npt.NDArray[np.floating], count: int) -> Ids:
    """Indices, rising, of the ``count`` largest values; of equal ones the lowest. No sort of all of them."""
    if count >= len(values):
        return np.arange(len(values))
    return _down_to(values, np.partition(values, len(values) - count)[len(values) - count], count)


def _down_to(values: npt.NDArray[np.floating], last: np.floating, count: int) -> Ids:
    """Indices, rising, of the ``count`` largest values, the least of which is ``last``."""
    at_last = np.flatnonzero(values >= last)
    surplus = len(at_last) - count
    if surplus > 0:  # of those that are equal to the last, the highest indices
        at_last = np.delete(at_last, np.flatnonzero(values[at_last] == last)[-surplus:])
    return at_last


def _nucleus(weights: Floats, top_p: float) -> Ids:
    """Indices, rising, of the fewest largest weights that have ``top_p`` of the sum; at least one (Holtzman et al. 2019)."""
    wanted = top_p * float(weights.sum())
    for look in (_FIRST_LOOK, len(weights)):
        rest = max(len(weights) - look, 0)
        falling = np.sort(np.partition(weights, rest)[rest:])[::-1]
        needed = int(np.searchsorted(np.cumsum(falling), wanted, side="left")) + 1
        if needed <= len(falling):
            break
    # Where rounding leaves the wanted sum just out of reach, all of them are the nucleus.
    needed = min(needed, len(falling))
    return _down_to(weights, falling[needed - 1], needed)


def _with_logprobs(logits: npt.NDArray[np.float32], token: int, num_top: int) -> Sampled:
    wide = logits.astype(np.float64)
    wide -= wide.max()
    log_total = math.log(float(np.exp(wide).sum()))

    def logprob_of(index: int) -> float:
        return max(float(wide[index]) - log_total, LEAST_LOGPROB)  # at most 0: the sum has the largest's 1 in it

    top = _largest(logits, num_top) if num_top else np.arange(0)
    falling = top[np.argsort(-logits[top], kind="stable")].tolist()
    return Sampled(token, logprob_of(token), tuple(TokenLogprob(index, logprob_of(index)) for index in falling))
