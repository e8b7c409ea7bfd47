"""The toy that simulated meshes serve, its text side, and what it answers in one piece."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache

import trio

from tessella_p2p.base.errors import InvalidRequest
from tessella_p2p.base.ids import LayerRange, SessionId
from tessella_p2p.base.limits import MAX_POSITIONS
from tessella_p2p.entry.api import ModelFeatures
from tessella_p2p.entry.text import TextDecoder
from tessella_p2p.model.grammar import Constraint, GrammarCompiler
from tessella_p2p.stages.engine import Sampled, SessionKey, StepInput, StepOutput
from tessella_p2p.stages.pooling import Pool
from tessella_p2p.stages.sampler import Sampler
from tessella_p2p.stages.toy import HIDDEN_SIZE, ToyEngine, ToyModel
from tessella_p2p.wire.frames import DType
from tessella_p2p.wire.messages import Grammar, Sampling

MODEL_ID = "toy"
RECIPE = "f32"
ROOT = hashlib.sha256(b"toy manifest").digest()
CONTRACT = hashlib.sha256(b"toy contract").digest()
_GREEDY = Sampling()


class ToyText:
    """Token ids as hexadecimal words."""

    def push(self, token_id: int) -> str:
        """The token's word."""
        return f"{token_id:x} "

    def flush(self) -> str:
        """Nothing is ever held back."""
        return ""


@lru_cache(maxsize=4)
def toy_grammars(vocabulary: int) -> GrammarCompiler:
    """Grammars over a toy's words. The last token ends an answer, for grammars alone: ask for more words than the answer may have."""
    words = [ToyText().push(token).encode() for token in range(vocabulary)]
    ids = {word.decode(): token for token, word in enumerate(words)}
    return GrammarCompiler(words, (), [vocabulary - 1], lambda text: [ids.get(f"{word} ", 0) for word in text.split()])


class ToyCodec:
    """The text side of a `ToyModel`; implements `entry.codec.PromptCodec`. No token ends an answer."""

    def __init__(self, model: ToyModel) -> None:
        self.total_layers = model.layers
        self.vocabulary = model.vocabulary
        self.end_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        """The token's word."""
        return ToyText().push(token_id).encode()

    @property
    def features(self) -> ModelFeatures:
        """None but text and vectors."""
        return ModelFeatures(False, False, context_length=MAX_POSITIONS, embedding_length=HIDDEN_SIZE)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] = ()
    ) -> list[int]:
        """A toy has no template."""
        raise InvalidRequest("the toy model has no chat template", "messages")

    async def encode_gap(self, prefix: str, suffix: str) -> list[int]:
        """A toy has no tokens for it."""
        raise InvalidRequest("the toy model has no fill-in-the-middle tokens", "suffix")

    async def encode_prompt(self, prompt: str) -> list[int]:
        """One token a character."""
        return [ord(character) % self.vocabulary for character in prompt]

    async def check_grammar(self, grammar: Grammar) -> Constraint:
        """Its words are text like any other."""
        await trio.lowlevel.checkpoint()
        return toy_grammars(self.vocabulary).compile(grammar)

    def decoder(self) -> TextDecoder:
        """A fresh decoder."""
        return ToyText()


def whole_model_draws(
    model: ToyModel, prompt: Sequence[int], max_tokens: int, params: Sampling = _GREEDY
) -> tuple[Sampled, ...]:
    """What a toy in one piece draws, without any network; with logprobs where ``params`` asks for alternatives."""
    engine = ToyEngine(model, LayerRange(0, model.layers), max_positions=len(prompt) + max_tokens)
    key = SessionKey(SessionId(bytes(16)), 0)
    engine.open_session(key, len(prompt) + max_tokens)
    constraint = None if params.grammar is None else toy_grammars(model.vocabulary).compile(params.grammar)
    sampler = Sampler(params, prompt, logprobs=params.num_top > 0, constraint=constraint)
    drawn: list[Sampled] = []
    ids, position = list(prompt), 0
    while len(drawn) < max_tokens:
        body = b"".join(token.to_bytes(4, "little") for token in ids)
        (answer,) = engine.forward([StepInput(key, position, len(ids), DType.U32, body, sampler)])
        assert isinstance(answer, Sampled)
        position += len(ids)
        ids = [answer.token_id]
        drawn.append(answer)
    return tuple(drawn)


def whole_model_tokens(
    model: ToyModel, prompt: Sequence[int], max_tokens: int, params: Sampling = _GREEDY
) -> tuple[int, ...]:
    """The tokens of `whole_model_draws`."""
    return tuple(each.token_id for each in whole_model_draws(model, prompt, max_tokens, params))


def whole_model_vector(model: ToyModel, ids: Sequence[int]) -> tuple[float, ...]:
    """What an embedding of ``ids`` comes to in a toy in one piece, without any network."""
    engine = ToyEngine(model, LayerRange(0, model.layers), max_positions=len(ids))
    key = SessionKey(SessionId(bytes(16)), 0)
    engine.open_session(key, len(ids))
    body = b"".join(token.to_bytes(4, "little") for token in ids)
    (answer,) = engine.forward([StepInput(key, 0, len(ids), DType.U32, body, normed=True)])
    assert isinstance(answer, StepOutput)
    pool = Pool(engine.hidden_size)
    pool.add(answer.body)
    return pool.pooled().vector
