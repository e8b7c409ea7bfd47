"""Fill-in-the-middle tokens: found by key or by name, framed in order, and never written by a client's text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import ArtifactError, InvalidRequest, PromptTooLong
from tessella_p2p.model.artifact import Artifact
from tessella_p2p.model.gguf import GgufFile
from tessella_p2p.model.tokenizer import Tokenizer, TokenKind
from tests.model.fim_artifact import CONTROL, text_metadata, tokens, write_fim_artifact

NAMES = tokens()
PREFIX, SUFFIX, MIDDLE = (NAMES.index(f"<|fim_{part}|>") for part in ("prefix", "suffix", "middle"))


def tokenizer(**changes: object) -> Tokenizer:
    return Tokenizer.from_metadata(
        text_metadata() | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}, "m"
    )


def renamed(names: dict[str, str]) -> Tokenizer:
    return tokenizer(tokens=tuple(names.get(name, name) for name in NAMES))


def test_a_gap_is_framed_in_the_order_prefix_suffix_middle() -> None:
    model = tokenizer()
    ids = model.encode_gap("def f(", "return x")
    assert ids == [PREFIX, *model.encode("def f("), SUFFIX, *model.encode("return x"), MIDDLE]
    assert model.encode_gap("", "") == [PREFIX, SUFFIX, MIDDLE]


def test_the_token_that_begins_a_sequence_comes_first_where_the_model_wants_it() -> None:
    assert tokenizer(add_bos_token=True).encode_gap("", "")[0] == NAMES.index("<|endoftext|>")


@given(texts=st.lists(st.sampled_from([*CONTROL, "<|", "fim_", "suffix|>", "x", "é", "🦜"])).map("".join))
@settings(max_examples=100, deadline=None)
def test_what_a_client_writes_never_is_a_control_token(texts: str) -> None:
    model = tokenizer()
    ids = model.encode_gap(texts, texts)
    control = set(model.control.values())
    assert [i for i in ids if i in control] == [PREFIX, SUFFIX, MIDDLE]
    assert model.decode(ids) == 2 * texts


@pytest.mark.parametrize("kind", [TokenKind.USER_DEFINED, TokenKind.CONTROL])
def test_gap_tokens_are_control_tokens_whatever_their_type_says(kind: TokenKind) -> None:
    kinds = tuple(int(kind if "fim" in name else TokenKind.NORMAL) for name in NAMES)
    model = tokenizer(token_type=kinds)
    assert PREFIX not in model.encode("<|fim_prefix|>")
    assert model.token_bytes(MIDDLE) == b""


@pytest.mark.parametrize("keys", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")])
def test_the_metadata_say_which_tokens_they_are(keys: tuple[str, str, str]) -> None:
    prefix, suffix, middle = (f"{key}_token_id" for key in keys)
    found = tokenizer(**{prefix: MIDDLE, suffix: PREFIX, middle: SUFFIX}).gap
    assert found is not None
    assert (found.prefix, found.suffix, found.middle) == (MIDDLE, PREFIX, SUFFIX)


@pytest.mark.parametrize(
    "family",
    [
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<PRE>", "<SUF>", "<MID>"),
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ],
)
def test_families_of_names_are_known(family: tuple[str, str, str]) -> None:
    found = renamed(dict(zip(("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), family, strict=True))).gap
    assert found is not None
    assert (found.prefix, found.suffix, found.middle) == (PREFIX, SUFFIX, MIDDLE)


def test_tokens_of_different_families_are_no_set() -> None:
    assert renamed({"<|fim_prefix|>": "<PRE>"}).gap is None


def test_padding_ends_what_is_filled_in() -> None:
    assert NAMES.index("<|fim_pad|>") in tokenizer().end_ids
    assert NAMES.index("<|fim_pad|>") not in renamed({"<|fim_middle|>": "<other>"}).end_ids


def test_a_model_without_the_tokens_refuses_by_the_field(smollm2_path: Path) -> None:
    with GgufFile.open(smollm2_path) as file:
        model = Tokenizer.from_metadata(file.metadata, "m")
    assert model.gap is None
    with pytest.raises(InvalidRequest) as caught:
        model.encode_gap("a", "b")
    assert caught.value.param == "suffix"


@pytest.mark.parametrize("wrong", [-1, len(NAMES), "5", True, 5.0])
def test_an_id_that_is_no_token_is_an_artifact_error(wrong: object) -> None:
    with pytest.raises(ArtifactError, match="fim_suf_token_id"):
        tokenizer(fim_suf_token_id=wrong)


def test_one_token_cannot_be_two_of_them() -> None:
    with pytest.raises(ArtifactError, match="stands for two"):
        tokenizer(fim_pre_token_id=PREFIX, fim_suf_token_id=PREFIX, fim_mid_token_id=MIDDLE)


def test_text_that_cannot_be_encoded_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        tokenizer().encode_gap("\ud800", "")
    with pytest.raises(PromptTooLong):
        tokenizer().encode_gap("", "x" * 100_000, max_ids=100)


def test_the_small_artifact_has_everything(tmp_path: Path) -> None:
    with Artifact.open(write_fim_artifact(tmp_path)) as artifact:
        assert artifact.model_id == "tiny-fim"
        assert artifact.tokenizer.gap is not None
        assert artifact.shows_tools
        assert artifact.config.vocabulary == len(NAMES)
