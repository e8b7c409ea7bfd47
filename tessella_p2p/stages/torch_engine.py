"""The torch engine for llama models: a range of layers on one device.

On the CPU its rows have the same bits in any batch, chunk, thread count and split. On CUDA and MPS the same code runs on the
library's products, whose order of additions may follow the batch. KV is an arena of slots, one for each session at its longest; there
is no prefix cache, and nobody is evicted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tessella_p2p.base.errors import InvalidStep, TessellaError
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.model.config import ModelConfig
from tessella_p2p.model.gguf import GgufFile
from tessella_p2p.model.recipe import Recipe
from tessella_p2p.stages.engine import KvUse, SessionKey, StepAnswer, StepInput, StepOutput, check_body
from tessella_p2p.stages.sessions import KvSession, SessionTable
from tessella_p2p.stages.torch_attention import KV_BLOCK, Attention, KvArena, Segment, rope_tables
from tessella_p2p.stages.torch_device import prepare, torch_device
from tessella_p2p.stages.torch_weights import TORCH_DTYPES, LayerWeights, StageWeights, embed, load_weights
from tessella_p2p.wire.frames import DType

_EXPONENTS = {DType.BF16: 0x7F80, DType.F16: 0x7C00}
"""The exponent's bits, all set in what is not finite."""


@dataclass(frozen=True, slots=True)
class _Work:
    """An admitted step: where its answer goes, its session, and its rows as a tensor [rows, hidden]."""

    index: int
    step: StepInput
    session: KvSession
    hidden: Tensor


class TorchEngine:
    """A stage of a llama model; implements `engine.StageEngine`. Made by `load`.

    Attributes:
        config: the whole model's.
        recipe: its arithmetic.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: LayerRange,
        recipe: Recipe,
        weights: StageWeights,
        *,
        device: torch.device,
        threads: int,
        max_sessions: int,
        max_positions: int,
    ) -> None:
        self.config = config
        self.recipe = recipe
        self.layers = layers
        self.is_head = config.is_head(layers)
        self.is_tail = config.is_tail(layers)
        self.hidden_size = config.hidden
        self.vocabulary = config.vocabulary
        self.wire_dtype = recipe.wire_dtype
        self.max_sessions = max_sessions
        self.max_positions = max_positions
        self._weights = weights
        self._threads = threads
        self._dtype = TORCH_DTYPES[recipe.activation]
        self._device = device
        self._arena = KvArena(config, len(layers), max_sessions, max_positions, device)
        cos, sin = rope_tables(config, max_positions)
        self._rope = cos.to(device), sin.to(device)
        self._sessions = SessionTable(max_sessions, max_positions)
        self._pages_used = 0

    @classmethod
    def load(
        cls,
        path: Path,
        layers: LayerRange,
        recipe: Recipe,
        *,
        device: str = "cpu",
        threads: int,
        max_sessions: int,
        max_positions: int,
    ) -> TorchEngine:
        """Read ``layers`` from a GGUF file; see `loading.load_engine`."""
        where = torch_device(recipe, device)
        prepare(where)
        torch.set_num_threads(threads)
        with GgufFile.open(path) as file, torch.inference_mode():
            config = ModelConfig.from_gguf(file)
            recipe.check_architecture(config.architecture)
            weights = load_weights(file, config, layers, recipe, where)
            return cls(
                config,
                layers,
                recipe,
                weights,
                device=where,
                threads=threads,
                max_sessions=max_sessions,
                max_positions=min(max_positions, config.context_length),
            )

    @property
    def memory_bytes(self) -> int:
        """See `engine.StageEngine.memory_bytes`."""
        return self._weights.memory_bytes + self._arena.memory_bytes + sum(table.nbytes for table in self._rope)

    @property
    def kv(self) -> KvUse:
        """See `engine.StageEngine.kv`; a page is a block of a session's own slot."""
        num_pages = self.max_sessions * (self._arena.shape[4] // KV_BLOCK)
        return KvUse(
            page_positions=KV_BLOCK,
            page_bytes=self._arena.memory_bytes // num_pages,
            pages_total=num_pages,
            pages_used=self._pages_used,
        )

    def close(self) -> None:
        """See `engine.StageEngine.close`."""
        del self._weights, self._arena, self._rope
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def open_session(self, key: SessionKey, max_positions: int, scope: bytes = b"") -> None:
        """See `engine.StageEngine.open_session`."""
        self._sessions.open(key, max_positions)

    def keep(self, waiting: Collection[SessionKey]) -> None:
        """See `engine.StageEngine.keep`; a slot is its session's until that is closed."""

    def cached_positions(self, key: SessionKey) -> int:
        """See `engine.StageEngine.cached_positions`; there is no prefix cache."""
        return 0

    def close_session(self, key: SessionKey) -> None:
        """See `engine.StageEngine.close_session`."""
        session = self._sessions.close(key)
        if session is not None:
            self._arena.clear(session.slot, 0, session.written)
            self._count_pages()

    def _count_pages(self) -> None:
        """Another thread reads the sum; the sessions are this thread's."""
        self._pages_used = sum(-(-session.position // KV_BLOCK) for session in self._sessions)

    def forward(self, batch: Sequence[StepInput]) -> list[StepAnswer]:
        """See `engine.StageEngine.forward`."""
        if torch.get_num_threads() != self._threads:  # the count belongs to the calling thread
            torch.set_num_threads(self._threads)
        answers: list[StepAnswer] = [None] * len(batch)
        works: list[_Work] = []
        with torch.inference_mode():
            for index, step in enumerate(batch):
                admitted = self._admit(index, step, works)
                if isinstance(admitted, _Work):
                    works.append(admitted)
                else:
                    answers[index] = admitted
            if works:
                self._answer(works, self._hidden_states(works), answers)
                self._count_pages()
        return answers

    # ---- in ----

    def _admit(self, index: int, step: StepInput, works: Sequence[_Work]) -> _Work | TessellaError:
        session = self._sessions.admit(step)
        if isinstance(session, TessellaError):
            return session
        if any(work.session is session for work in works):
            return InvalidStep(f"two steps of session {step.session} in one batch")
        refused = check_body(self, step)
        if refused is not None:
            return refused
        hidden = self._token_rows(step) if self._weights.embedding is not None else self._hidden_rows(step)
        return hidden if isinstance(hidden, InvalidStep) else _Work(index, step, session, hidden)

    def _token_rows(self, step: StepInput) -> Tensor | InvalidStep:
        assert self._weights.embedding is not None
        token_ids = np.frombuffer(step.body, "<u4")
        if int(token_ids.max()) >= self.config.vocabulary:
            return InvalidStep(f"token id {token_ids.max()} is out of the vocabulary of {self.config.vocabulary}")
        return embed(self._weights.embedding, token_ids, self._dtype)

    def _hidden_rows(self, step: StepInput) -> Tensor | InvalidStep:
        if step.dtype is DType.F32:
            floats = np.frombuffer(step.body, "<f4").astype(np.float32)
            finite, hidden = bool(np.isfinite(floats).all()), torch.from_numpy(floats)
        else:
            halves = np.frombuffer(step.body, "<u2").astype(np.uint16)
            exponent = _EXPONENTS[step.dtype]
            finite = not bool(((halves & exponent) == exponent).any())
            hidden = torch.from_numpy(halves.view(np.int16)).view(self._dtype)
        if not finite:
            return InvalidStep(f"hidden states of session {step.session} that are not finite")
        return hidden.view(step.rows, self.hidden_size)

    # ---- through ----

    def _hidden_states(self, works: Sequence[_Work]) -> Tensor:
        """[rows of all steps, hidden] behind the last layer of this stage."""
        segments = [Segment(work.session.slot, work.step.position, work.step.rows) for work in works]
        for work in works:
            work.session.written = work.step.position + work.step.rows
        x = works[0].hidden if len(works) == 1 else torch.cat([work.hidden for work in works])
        x = x.to(self._device)
        attention = Attention(self.config, self._rope, segments)
        for weights, kv in zip(self._weights.layers, self._arena.layers, strict=True):
            x = self._layer(weights, kv, x, attention)
        return x

    def _layer(self, weights: LayerWeights, kv: Tensor, x: Tensor, attention: Attention) -> Tensor:
        qkv = weights.qkv.apply(self._norm(x, weights.attention_norm))
        x = x + weights.attention_output.apply(attention.apply(qkv, kv).to(self._dtype))
        gate, up = weights.gate_up.apply(self._norm(x, weights.ffn_norm)).chunk(2, -1)
        return x + weights.down.apply(functional.silu(gate).mul_(up))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.config.rms_eps)

    # ---- out ----

    def _answer(self, works: Sequence[_Work], x: Tensor, answers: list[StepAnswer]) -> None:
        finite = torch.isfinite(x).all(-1).cpu().numpy()
        body = x.view(torch.int16 if x.element_size() == 2 else x.dtype).cpu().numpy().data.cast("B")
        row_bytes = self.hidden_size * x.element_size()
        row = 0
        drawn: list[tuple[_Work, int]] = []
        for work in works:
            end = row + work.step.rows
            if not finite[row:end].all():
                answers[work.index] = self._overflowed(work)
            else:
                work.session.position += work.step.rows
                if not self.is_tail:
                    answers[work.index] = StepOutput(body[row * row_bytes : end * row_bytes], self.wire_dtype)
                elif work.step.normed:
                    answers[work.index] = StepOutput(self._normed(x[row:end]).reshape(-1).data.cast("B"), DType.F32)
                elif work.step.sample is not None:
                    drawn.append((work, end - 1))
            row = end
        if drawn:
            logits = self._logits(x[[last for _, last in drawn]])
            for (work, _), row_logits in zip(drawn, logits, strict=True):
                if np.isfinite(row_logits).all():
                    answers[work.index] = self._draw(work, row_logits)
                else:
                    work.session.position -= work.step.rows
                    answers[work.index] = self._overflowed(work)

    def _overflowed(self, work: _Work) -> InvalidStep:
        """Finite input whose output is not: take the rows out of the KV again, where they would spoil the next step."""
        session = work.session
        self._arena.clear(session.slot, session.position, session.written)
        return InvalidStep(f"the step of session {work.step.session} at {work.step.position} has no finite result")

    def _normed(self, hidden: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        """[rows, hidden] float32 behind the last norm."""
        tail = self._weights.tail
        assert tail is not None
        return self._norm(hidden, tail.norm).float().cpu().numpy()

    def _logits(self, hidden: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        """[rows, vocabulary] float32."""
        tail = self._weights.tail
        assert tail is not None
        return tail.output.apply(self._norm(hidden, tail.norm)).float().cpu().numpy()

    def _draw(self, work: _Work, logits: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> StepAnswer:
        sample = work.step.sample
        assert sample is not None
        return sample.draw(logits, work.session.position)
