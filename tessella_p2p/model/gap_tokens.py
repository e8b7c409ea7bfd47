"""The tokens by which a model is asked for what is missing between two texts (fill-in-the-middle); pure.

Code models are trained on documents of which a piece was moved to the end: ``<prefix> before <suffix> after <middle> piece``
(the PSM order of "Efficient Training of Language Models to Fill in the Middle", arXiv 2207.14255). Which tokens stand for the three
is in the metadata of newer files (``tokenizer.ggml.fim_pre_token_id`` …), in those of older ones under shorter names, and else known
by the token's text, as llama.cpp knows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tessella_p2p.base.errors import ArtifactError

_KEYS: Final = (
    ("fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id"),
    ("prefix_token_id", "suffix_token_id", "middle_token_id"),
)
_NAMES: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("<PRE>", "<SUF>", "<MID>"),
)
"""Of prefix, suffix and middle; never one of this line and one of that."""
_END_KEYS: Final = ("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")
_END_NAMES: Final = frozenset(
    {
        "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>",
        "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<repo_name>",
        "<|file_sep|>", "<file_sep>", "<EOT>",
    }
)  # fmt: skip
"""What such a model writes when the piece is over: it goes on with padding, or with the next file of its training text."""


@dataclass(frozen=True, slots=True)
class GapTokens:
    """Ids of the tokens that frame a gap. ``end_ids`` are those that end what is filled in, beside the model's own."""

    prefix: int
    suffix: int
    middle: int
    end_ids: frozenset[int]

    @property
    def all_ids(self) -> frozenset[int]:
        """All of them: none is text, whatever its type says."""
        return self.end_ids | {self.prefix, self.suffix, self.middle}


def find_gap_tokens(
    metadata: Mapping[str, object], special: Mapping[str, int], vocabulary: int, source: str
) -> GapTokens | None:
    """The gap tokens of a vocabulary; None of a model that lacks one of the three.

    Args:
        metadata: the GGUF header's.
        special: id of each token that is more than text, by its name.
        vocabulary: ids are below this.
        source: the file's name, for messages.

    Raises:
        ArtifactError: an id that is none of the vocabulary, or one that stands for two of the three.
    """
    by_key = [tuple(_token_id(metadata, key, vocabulary, source) for key in keys) for keys in _KEYS]
    by_name = [tuple(special.get(name) for name in names) for names in _NAMES]
    whole = [found for found in (*by_key, *by_name) if None not in found]
    if not whole:
        return None
    prefix, suffix, middle = (token_id for token_id in whole[0] if token_id is not None)
    if len({prefix, suffix, middle}) != 3:
        raise ArtifactError(f"{source}: one token stands for two of prefix, suffix and middle")
    ends = {_token_id(metadata, key, vocabulary, source) for key in _END_KEYS}
    ends |= {special[name] for name in _END_NAMES & special.keys()}
    return GapTokens(prefix, suffix, middle, frozenset(i for i in ends if i is not None))


def _token_id(metadata: Mapping[str, object], key: str, vocabulary: int, source: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocabulary:
        raise ArtifactError(f"{source}: tokenizer.ggml.{key} = {value!r} is no token of a vocabulary of {vocabulary}")
    return value
