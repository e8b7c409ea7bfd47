"""The tokenizer against tiktoken and transformers (golden ids), and against metadata that are wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import ArtifactError, InvalidRequest, InvalidStep, NotCertified, PromptTooLong
from tessella_p2p.model.gguf import GgufFile
from tessella_p2p.model.tokenizer import IncrementalDecoder, Tokenizer

DATA = Path(__file__).parents[1] / "data"
GREEDY = json.loads((DATA / "greedy_f32.json").read_text("utf-8"))["cases"]
PLAIN = json.loads((DATA / "tokenizer_golden.json").read_text("utf-8"))["cases"]


@pytest.fixture(scope="module")
def metadata(smollm2_path: Path) -> Iterator[dict[str, object]]:
    with GgufFile.open(smollm2_path) as file:
        yield dict(file.metadata)


@pytest.fixture(scope="module")
def tokenizer(metadata: dict[str, object]) -> Tokenizer:
    return Tokenizer.from_metadata(metadata, "smollm2")


@pytest.mark.parametrize("case", GREEDY, ids=lambda case: case["prompt"][:20])
def test_prompts_have_the_ids_of_transformers(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    assert tokenizer.encode(case["prompt_text"], parse_special=True) == case["prompt_ids"]
    assert tokenizer.encode_prompt(case["prompt_text"]) == case["prompt_ids"]


@pytest.mark.parametrize("case", GREEDY, ids=lambda case: case["prompt"][:20])
def test_answers_have_the_text_of_transformers(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    assert tokenizer.decode(map(int, case["output_ids"])) == case["output_text"].replace("<|im_end|>", "")


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: ascii(case["text"])[:20])
def test_words_are_cut_as_tiktoken_cuts_them(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    assert tokenizer.encode(case["text"]) == case["ids"]


def test_control_tokens_are_text_unless_the_caller_means_them(tokenizer: Tokenizer) -> None:
    text = "a<|im_end|>b"
    assert tokenizer.eos_id is not None
    assert tokenizer.eos_id not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text, parse_special=True).count(tokenizer.eos_id) == 1
    assert tokenizer.decode(tokenizer.encode(text, parse_special=True)) == "ab"


def test_answers_end_where_the_artifact_says(tokenizer: Tokenizer) -> None:
    names = {name for name, token_id in tokenizer.control.items() if token_id in tokenizer.end_ids}
    assert names == {"<|im_end|>", "<|endoftext|>"}
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocabulary) == (1, 2, 49_152)


# Bytes without a token of their own (a few control characters and the lead bytes of planes 4 to 11) are lost, as in the reference.
KEPT = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x3FFFF, exclude_categories=["Cs"]), max_size=60)


@given(text=KEPT)
@settings(max_examples=100, deadline=None)
def test_decode_gives_the_text_back(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=KEPT)
@settings(max_examples=100, deadline=None)
def test_incremental_text_is_the_whole_text_and_never_half_a_character(text: str, tokenizer: Tokenizer) -> None:
    decoder = IncrementalDecoder(tokenizer)
    pushed = [decoder.push(token_id) for token_id in tokenizer.encode(text)]
    assert "".join(pushed) == text
    assert decoder.flush() == ""


@given(ids=st.lists(st.integers(0, 49_151), max_size=30))
@settings(max_examples=100, deadline=None)
def test_any_ids_decode_alike_at_once_and_one_by_one(ids: list[int], tokenizer: Tokenizer) -> None:
    decoder = IncrementalDecoder(tokenizer)
    assert "".join(map(decoder.push, ids)) + decoder.flush() == tokenizer.decode(ids)


def test_a_character_that_is_cut_off_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    decoder = IncrementalDecoder(tokenizer)
    ids = tokenizer.encode("🙂")
    assert len(ids) > 1
    assert [decoder.push(token_id) for token_id in ids[:-1]] == [""] * (len(ids) - 1)
    assert decoder.flush() == "�"
    assert decoder.push(tokenizer.encode("x")[0]) == "x"


@pytest.mark.parametrize("token_id", [-1, 49_152, 2**32])
def test_ids_outside_of_the_vocabulary_are_refused(tokenizer: Tokenizer, token_id: int) -> None:
    with pytest.raises(InvalidStep):
        IncrementalDecoder(tokenizer).push(token_id)


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest):
        tokenizer.encode("a\ud83d")


def test_a_text_that_cannot_fit_is_refused_by_its_length(tokenizer: Tokenizer) -> None:
    with pytest.raises(PromptTooLong):
        tokenizer.encode("9" * 100_000, max_ids=10)
    with pytest.raises(PromptTooLong):
        tokenizer.encode("9" * 10_000_000)
    assert len(tokenizer.encode(" " * 1000, max_ids=100)) <= 100


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", "llama"),
        ("model", None),
        ("pre", "llama-bpe"),
        ("pre", None),
        ("add_space_prefix", True),
        ("token_type", (9,) * 49_152),
    ],
)
def test_what_no_test_certifies_is_refused_by_name(metadata: dict[str, object], key: str, value: object) -> None:
    with pytest.raises(NotCertified, match=r"x\.gguf"):
        Tokenizer.from_metadata(metadata | {f"tokenizer.ggml.{key}": value}, "x.gguf")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokens", None),
        ("tokens", ()),
        ("tokens", (1, 2)),
        ("tokens", ("a", "a")),
        ("tokens", ("x" * 2000,)),
        ("token_type", None),
        ("token_type", (1,)),
        ("merges", None),
        ("merges", ("a",)),
        ("merges", ("a 日本",)),
        ("eos_token_id", 49_152),
        ("bos_token_id", "1"),
    ],
)
def test_metadata_that_do_not_fit_are_an_artifact_error(metadata: dict[str, object], key: str, value: object) -> None:
    with pytest.raises(ArtifactError, match=r"x\.gguf"):
        Tokenizer.from_metadata(metadata | {f"tokenizer.ggml.{key}": value}, "x.gguf")


def test_a_token_that_is_not_in_the_byte_alphabet_is_an_artifact_error(metadata: dict[str, object]) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, tuple)
    changed = {"tokenizer.ggml.tokens": (*tokens[:-1], "a b"), "tokenizer.ggml.merges": ()}
    with pytest.raises(ArtifactError, match="byte alphabet"):
        Tokenizer.from_metadata(metadata | changed, "x.gguf")
