"""The GGUF reader: files by the specification, and every way to damage one."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import ArtifactError, NotCertified
from tessella_p2p.model.gguf import GgmlType, GgufFile
from tests.model.tiny_gguf import Stored, build, floats, q4_1, string, value

METADATA: dict[str, object] = {
    "general.architecture": "llama",
    "a.flag": True,
    "a.count": 7,
    "a.real": 0.5,
    "a.words": ("one", "zwei", "三"),
    "a.numbers": (1, 2, 3),
    "a.nested": ((1, 2), (3, 4)),
}
MATRIX = np.arange(6, dtype=np.float32).reshape(2, 3)
TENSORS = {
    "first": floats(MATRIX),
    "packed": q4_1(np.random.default_rng(1), (4, 64), 1.0),
    "vector": floats(np.ones(5, np.float32)),
}


def opened(folder: Path, data: bytes) -> GgufFile:
    path = folder / "model.gguf"
    path.write_bytes(data)
    return GgufFile.open(path)


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors_are_what_was_written(tmp_path: Path, version: int) -> None:
    with opened(tmp_path, build(METADATA, TENSORS, version=version)) as file:
        assert dict(file.metadata) == METADATA
        assert list(file.tensors) == list(TENSORS)
        for name, stored in TENSORS.items():
            info = file.tensors[name]
            assert (info.name, info.shape, info.kind) == (name, stored.shape, stored.kind)
            assert bytes(file.read(name)) == stored.raw
            assert info.offset % 32 == 0
        assert np.array_equal(np.frombuffer(file.read("first"), "<f4").reshape(2, 3), MATRIX)


def test_another_alignment_is_honoured(tmp_path: Path) -> None:
    data = build({**METADATA, "general.alignment": 256}, TENSORS, alignment=256)
    with opened(tmp_path, data) as file:
        assert file.data_offset % 256 == 0
        assert bytes(file.read("packed")) == TENSORS["packed"].raw


def test_reading_counts_the_bytes_of_each_tensor_and_copies_none(tmp_path: Path) -> None:
    with opened(tmp_path, build(METADATA, TENSORS)) as file:
        assert file.bytes_read == {}
        view = file.read("packed")
        file.read("vector")
        file.read("vector")
        assert view.readonly
        assert file.bytes_read == {"packed": 160, "vector": 40}
        view.release()


def test_a_view_outlives_the_file(tmp_path: Path) -> None:
    file = opened(tmp_path, build(METADATA, TENSORS))
    view = file.read("first")
    file.close()
    assert bytes(view) == TENSORS["first"].raw


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    with opened(tmp_path, build(METADATA, TENSORS)) as file, pytest.raises(ArtifactError, match="'absent'"):
        file.read("absent")


def test_every_truncation_is_an_artifact_error(tmp_path: Path) -> None:
    whole = build(METADATA, TENSORS)
    for length in range(len(whole)):
        with pytest.raises(ArtifactError, match=r"model\.gguf"):
            opened(tmp_path, whole[:length])


def test_a_truncated_tensor_is_named_with_its_offset(tmp_path: Path) -> None:
    whole = build(METADATA, TENSORS)
    with pytest.raises(ArtifactError, match=r"'vector'.* at byte \d+"):
        opened(tmp_path, whole[:-1])


def test_a_missing_file_is_an_artifact_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="absent"):
        GgufFile.open(tmp_path / "absent.gguf")


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4),
    tail=st.binary(max_size=8),
)
def test_damaged_bytes_give_a_file_or_an_artifact_error(
    tmp_path: Path, edits: list[tuple[int, int]], tail: bytes
) -> None:
    data = bytearray(build(METADATA, TENSORS) + tail)
    for offset, byte in edits:
        data[offset % len(data)] = byte
    with suppress(ArtifactError), opened(tmp_path, bytes(data)) as file:
        for name in file.tensors:
            assert len(file.read(name)) == file.tensors[name].size_bytes


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200))
def test_any_bytes_after_the_magic_give_a_file_or_an_artifact_error(tmp_path: Path, data: bytes) -> None:
    with suppress(ArtifactError):
        opened(tmp_path, b"GGUF\x03\x00\x00\x00" + data).close()


HUGE = 1 << 62


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "cannot be read"),
        (b"PK\x03\x04 not a model at all", "no GGUF magic"),
        (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "metadata pairs"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", HUGE), "a metadata key of"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IIQ", 9, 6, HUGE), "elements"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IIQ", 9, 8, HUGE), "elements"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<I", 13), "unknown type 13"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"\xff" + value(1), "not UTF-8"),
        (build({"general.alignment": 24}, {}), "alignment"),
        (build({"general.alignment": "32"}, {}), "alignment"),
        (build({}, {"t": Stored((4, 20), GgmlType.Q4_1, b"")}), "Q4_1 blocks"),
        (build({}, {"t": Stored((0, 32), GgmlType.F32, b"")}), "blocks"),
        (build({}, {"t": Stored((1, 1, 1, 1, 1), GgmlType.F32, bytes(4))}), "5 dimensions"),
        (build({}, {"t": Stored((HUGE, 32), GgmlType.F32, b"")}), "ends after the file"),
    ],
)
def test_a_lie_about_a_size_is_refused_before_anything_is_allocated(tmp_path: Path, data: bytes, match: str) -> None:
    with pytest.raises(ArtifactError, match=match):
        opened(tmp_path, data)


def test_arrays_nested_without_end_are_refused(tmp_path: Path) -> None:
    nested = struct.pack("<IQ", 9, 1) * 500
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<I", 9) + nested
    with pytest.raises(ArtifactError, match="nests arrays"):
        opened(tmp_path, data)


def test_one_key_or_tensor_twice_is_refused(tmp_path: Path) -> None:
    pair = string("k") + value(1)
    with pytest.raises(ArtifactError, match="'k' stands there twice"):
        opened(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + pair + pair)
    entry = string("t") + struct.pack("<IQIQ", 1, 1, 0, 0)
    with pytest.raises(ArtifactError, match="'t' stands there twice"):
        opened(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + entry + entry + bytes(64))


def test_tensors_over_one_another_are_refused(tmp_path: Path) -> None:
    entries = b"".join(string(name) + struct.pack("<IQIQ", 1, 16, 0, offset) for name, offset in (("a", 0), ("b", 32)))
    with pytest.raises(ArtifactError, match="'b' overlaps"):
        opened(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + entries + bytes(256))


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_another_version_is_not_certified(tmp_path: Path, version: int) -> None:
    with pytest.raises(NotCertified, match=f"version {version}"):
        opened(tmp_path, build({}, {}, version=version))


def test_an_unknown_tensor_type_is_not_certified(tmp_path: Path) -> None:
    with pytest.raises(NotCertified, match="'t' has ggml type 39"):
        opened(tmp_path, build({}, {"t": Stored((32,), 39, bytes(32))}))


def test_the_real_model_reads_as_its_publisher_wrote_it(smollm2_path: Path) -> None:
    with GgufFile.open(smollm2_path) as file:
        assert file.metadata["general.architecture"] == "llama"
        assert len(file.tensors) == 272
        assert file.tensors["blk.29.ffn_down.weight"].shape == (576, 1536)
        assert file.tensors["token_embd.weight"].kind is GgmlType.Q8_0
        assert max(info.offset + info.size_bytes for info in file.tensors.values()) <= file.size_bytes
        assert file.bytes_read == {}
