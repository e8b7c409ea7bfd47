"""What an auditor finds out while it repeats a stage's work, row by row (pure).

The inputs are what the upstream peer shows; their digest says whether the audited stage had them. The outputs are this node's own. Bit
for bit, their digest is all that is said of them, and it is for the orchestrator to compare it with what the stage signed for: whoever
computed nothing has nothing to say. By tolerance the stage's own outputs, which the downstream peer shows, are compared here.
"""

from __future__ import annotations

from collections.abc import Iterable

from tessella_p2p.base.ids import PeerId
from tessella_p2p.stages.canary import scaled, shifted, turned
from tessella_p2p.stages.digest import RunningDigest
from tessella_p2p.stages.engine import Buffer, Sampled, StepOutput
from tessella_p2p.stages.pooling import VECTOR_DTYPE, Pooled
from tessella_p2p.stages.rows import deviation_ppm, floats_of
from tessella_p2p.wire.frames import DType

_ID_BYTES = DType.U32.size


class Recomputation:
    """Running digests of one audit.

    Args:
        digest_key: of the audited session.
        opened: the hash of its chain-open.
        scaling: canaries, whose known-wrong answers are digested too.
        vocabulary: token ids are below this.
    """

    def __init__(self, digest_key: bytes, opened: bytes, *, scaling: Iterable[PeerId] = (), vocabulary: int) -> None:
        self._input = RunningDigest(digest_key, opened)
        self._output = RunningDigest(digest_key, opened)
        self._claimed = RunningDigest(digest_key, opened)
        self._canaries = {peer: RunningDigest(digest_key, opened) for peer in scaling}
        self._vocabulary = vocabulary
        self._has_drawn = False
        self.positions = 0
        """How far it is."""
        self.error_ppm = 0
        """The largest deviation of what was claimed so far; see `rows.deviation_ppm`."""

    @property
    def input_digest(self) -> bytes:
        """Of the rows that were shown."""
        return self._input.digest()

    @property
    def output_digest(self) -> bytes:
        """Of what this node computed from them."""
        return self._output.digest()

    @property
    def claimed_digest(self) -> bytes:
        """Of what the downstream peer shows."""
        return self._claimed.digest()

    def canary_digests(self) -> dict[PeerId, bytes]:
        """Of what each canary would have answered."""
        return {peer: digest.digest() for peer, digest in self._canaries.items()}

    def step(
        self,
        inputs: Buffer,
        rows: int,
        answer: StepOutput | Sampled | Pooled | None,
        *,
        draws: bool,
        claimed: StepOutput | None = None,
    ) -> None:
        """The next ``rows`` rows.

        Args:
            inputs: as they were shown.
            answer: what this node's engine made of them; None of a tail that was asked for nothing behind them.
            draws: the tail drew a token behind the last of them, or made its vector.
            claimed: where they are compared, the rows that the downstream peer shows; as wide as the answer's.
        """
        begins_draws = draws and not self._has_drawn
        self._has_drawn = self._has_drawn or draws
        self.positions += rows
        _append(self._input, inputs, begins_draws=begins_draws)
        if isinstance(answer, Sampled):
            self._draw(answer.token_id)
        elif isinstance(answer, Pooled):
            self._output.update_draw(self.positions, answer.body)
            for peer, digest in self._canaries.items():
                width = len(answer.body) // VECTOR_DTYPE.size
                digest.update_draw(self.positions, turned(answer.body, width, peer))
        elif isinstance(answer, StepOutput):
            _append(self._output, answer.body, begins_draws=begins_draws)
            for peer, digest in self._canaries.items():
                _append(digest, scaled(answer.body, answer.dtype, peer), begins_draws=begins_draws)
            if claimed is not None:
                _append(self._claimed, claimed.body, begins_draws=begins_draws)
                true, got = floats_of(answer.body, answer.dtype), floats_of(claimed.body, claimed.dtype)
                self.error_ppm = max(self.error_ppm, deviation_ppm(true, got, rows))

    def _draw(self, token: int) -> None:
        self._output.update_draw(self.positions, token.to_bytes(_ID_BYTES, "little"))
        for peer, digest in self._canaries.items():
            wrong = shifted(token, self._vocabulary, peer)
            digest.update_draw(self.positions, wrong.to_bytes(_ID_BYTES, "little"))


def _append(digest: RunningDigest, rows: Buffer, *, begins_draws: bool) -> None:
    digest.update(rows)
    if begins_draws:
        digest.mark_first_draw()
