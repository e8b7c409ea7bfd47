"""Manifests: one artifact has one root."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from tessella_p2p.base.errors import ArtifactError, NotCertified
from tessella_p2p.base.limits import CHUNK_BYTES
from tessella_p2p.model.artifact import Artifact, model_id_of
from tessella_p2p.model.gguf import GgmlType, GgufFile, TensorInfo
from tessella_p2p.model.manifest import (
    Manifest,
    build_manifest,
    contract_hash,
    encode_manifest,
    root,
)
from tessella_p2p.wire import cbor


def tensor(name: str, offset: int, rows: int = 4, columns: int = 64) -> TensorInfo:
    return TensorInfo(name, (rows, columns), GgmlType.Q4_1, offset, rows * columns // 32 * 20)


TENSORS = (tensor("a.weight", 32), tensor("b.weight", 1024), tensor("c.weight", 2048, rows=CHUNK_BYTES // 16))
SIZE_BYTES = TENSORS[-1].offset + TENSORS[-1].size_bytes
MANIFEST = Manifest(SIZE_BYTES, TENSORS, tuple(bytes([i]) * 32 for i in range(-(-SIZE_BYTES // CHUNK_BYTES))))


def write_gguf(path: Path, floats: int) -> Path:
    """A GGUF file with one F32 vector, by hand."""
    name = b"v"
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 0)
    header += struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, floats, 0, 0)
    header += bytes(-len(header) % 32)
    path.write_bytes(header + b"".join(struct.pack("<f", i) for i in range(floats)))
    return path


def test_the_root_is_the_hash_of_the_canonical_bytes() -> None:
    data = encode_manifest(MANIFEST)
    assert root(MANIFEST) == hashlib.sha256(data).digest()
    fields = cbor.decode(data)
    assert isinstance(fields, dict)
    assert fields["size_bytes"] == SIZE_BYTES
    assert fields["chunks"] == list(MANIFEST.chunks)
    assert fields["tensors"][0] == ["a.weight", "Q4_1", [4, 64], 32, 160]


def test_contract_depends_on_names_shapes_and_types_alone() -> None:
    moved = tuple(replace(info, offset=info.offset + 4096) for info in reversed(TENSORS))
    assert contract_hash(moved) == contract_hash(TENSORS)
    for other in (
        (*TENSORS[1:], replace(TENSORS[0], name="z")),
        (*TENSORS[1:], replace(TENSORS[0], shape=(64, 4))),
        (*TENSORS[1:], replace(TENSORS[0], kind=GgmlType.Q4_0)),
        TENSORS[1:],
    ):
        assert contract_hash(other) != contract_hash(TENSORS)


def test_a_file_has_a_hash_for_each_mib(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "v.gguf", CHUNK_BYTES // 4 + 10)
    seen: list[tuple[int, int]] = []
    with GgufFile.open(path) as file:
        manifest = build_manifest(path, file, lambda done, total: seen.append((done, total)))
    data = path.read_bytes()
    assert manifest.size_bytes == len(data)
    assert manifest.chunks == tuple(
        hashlib.sha256(data[i : i + CHUNK_BYTES]).digest() for i in range(0, len(data), CHUNK_BYTES)
    )
    assert seen == [(CHUNK_BYTES, len(data)), (len(data), len(data))]


def test_one_changed_bit_changes_the_root(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "v.gguf", 100)
    with GgufFile.open(path) as file:
        before = root(build_manifest(path, file))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with GgufFile.open(path) as file:
        assert root(build_manifest(path, file)) != before


def test_a_file_that_grows_or_vanishes_meanwhile_is_an_artifact_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "v.gguf", 100)
    with GgufFile.open(path) as file:
        with path.open("ab") as stream:
            stream.write(b"more")
        with pytest.raises(ArtifactError, match="changes while it is served"):
            build_manifest(path, file)
        path.unlink()
        with pytest.raises(ArtifactError, match="cannot be read"):
            build_manifest(path, file)


def test_the_real_artifact_is_what_its_parts_say(smollm2_path: Path) -> None:
    with Artifact.open(smollm2_path) as artifact:
        assert artifact.model_id == "smollm2-135m-instruct"
        assert len(artifact.costs.layer_bytes) == artifact.config.layers == 30
        once = sum(artifact.costs.layer_bytes) + artifact.costs.head_bytes
        assert once == sum(info.size_bytes for info in artifact.file.tensors.values()), "the embedding is tied"
        assert artifact.root == root(artifact.hash()) == hashlib.sha256(encode_manifest(artifact.manifest)).digest()
        assert artifact.root.hex() == "461474dff45c3121b647fb0badf09a9814b98ab13429d6360fe88d2573505b97"
        assert artifact.contract_hash == contract_hash(artifact.manifest.tensors)
        assert artifact.encode_messages([{"role": "user", "content": "Hi"}], now_ms=0)[-4:] == [1, 520, 9531, 198]
        assert artifact.file.bytes_read == {}, "no weight is needed to tokenise"


def test_an_artifact_that_is_no_model_is_refused_and_closed(tmp_path: Path) -> None:
    with pytest.raises((ArtifactError, NotCertified), match=r"v\.gguf"):
        Artifact.open(write_gguf(tmp_path / "v.gguf", 8))


@pytest.mark.parametrize(
    ("name", "model_id"),
    [("SmolLM2-135M.Q4_1.gguf", "smollm2-135m.q4_1"), ("my model (1).gguf", "my-model-1"), ("日本.gguf", "model")],
)
def test_a_file_gives_a_model_its_name(name: str, model_id: str) -> None:
    assert model_id_of(Path(name)) == model_id
