"""Manifests: one artifact has one root, and what a peer sends is a manifest or a typed error."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessella_p2p.base.errors import ArtifactError, MalformedMessage, NotCertified, TessellaError, VersionMismatch
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import CHUNK_BYTES
from tessella_p2p.model.artifact import Artifact, model_id_of
from tessella_p2p.model.gguf import GgmlType, GgufFile, TensorInfo
from tessella_p2p.model.manifest import (
    Manifest,
    StageCosts,
    build_manifest,
    contract_hash,
    decode_manifest,
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


def test_decode_gives_the_manifest_back_and_checks_its_root() -> None:
    data = encode_manifest(MANIFEST)
    assert decode_manifest(data, root(MANIFEST)) == MANIFEST
    assert root(MANIFEST) == hashlib.sha256(data).digest()
    with pytest.raises(MalformedMessage, match="not the manifest"):
        decode_manifest(data, bytes(32))


def test_a_tensor_names_the_chunks_that_hold_it() -> None:
    assert MANIFEST.chunk_range(TENSORS[0]) == range(1)
    assert MANIFEST.chunk_range(TENSORS[2]) == range(len(MANIFEST.chunks))
    exact = TensorInfo("x", (CHUNK_BYTES // 4,), GgmlType.F32, CHUNK_BYTES, CHUNK_BYTES)
    assert MANIFEST.chunk_range(exact) == range(1, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"size_bytes": SIZE_BYTES - 1},
        {"size_bytes": 0},
        {"size_bytes": 1 << 60},
        {"chunks": MANIFEST.chunks[:-1]},
        {"chunks": (*MANIFEST.chunks, bytes(32))},
        {"chunks": (*MANIFEST.chunks[:-1], bytes(31))},
        {"tensors": TENSORS[::-1]},
        {"tensors": (TENSORS[0], replace(TENSORS[1], offset=100))},
        {"tensors": (TENSORS[0], replace(TENSORS[1], name="a.weight"))},
        {"tensors": (replace(TENSORS[0], name=""),)},
        {"tensors": (replace(TENSORS[0], name="x" * 300),)},
        {"tensors": (replace(TENSORS[0], shape=()),)},
        {"tensors": (replace(TENSORS[0], shape=(0, 64)),)},
        {"tensors": (replace(TENSORS[0], shape=(4, 1 << 50)),)},
        {"tensors": (replace(TENSORS[0], size_bytes=1),)},
        {"tensors": (replace(TENSORS[0], offset=SIZE_BYTES),)},
    ],
    ids=str,
)
def test_a_manifest_that_does_not_hold_together_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(MalformedMessage):
        decode_manifest(encode_manifest(replace(MANIFEST, **change)))  # type: ignore[arg-type]


FIELDS = cbor.decode(encode_manifest(MANIFEST))
assert isinstance(FIELDS, dict)
PLAIN = dict(FIELDS)


@pytest.mark.parametrize(
    "fields",
    [
        [],
        {},
        PLAIN | {"extra": 1},
        PLAIN | {"chunk_bytes": 1},
        PLAIN | {"chunk_bytes": float(CHUNK_BYTES)},
        PLAIN | {"version": True},
        PLAIN | {"size_bytes": float(SIZE_BYTES)},
        PLAIN | {"tensors": {}},
        PLAIN | {"tensors": [[]]},
        PLAIN | {"tensors": [["a", "Q9_9", [4, 64], 32, 160]]},
        PLAIN | {"tensors": [["a", "Q4_1", [4.0, 64], 32, 160]]},
        PLAIN | {"tensors": [["a", 3, [4, 64], 32, 160]]},
        PLAIN | {"chunks": "x"},
        {key: value for key, value in PLAIN.items() if key != "tensors"},
    ],
    ids=lambda fields: str(fields)[:60],
)
def test_fields_of_another_form_are_refused(fields: object) -> None:
    with pytest.raises(MalformedMessage):
        decode_manifest(cbor.encode(fields))


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_refused_by_name(version: object) -> None:
    with pytest.raises(VersionMismatch, match="version 1"):
        decode_manifest(cbor.encode(PLAIN | {"version": version}))


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=33),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(sorted(PLAIN)), inner, max_size=5),
    max_leaves=10,
)


@given(
    st.one_of(
        st.binary(max_size=80),
        st.builds(lambda k, v: cbor.encode(PLAIN | {k: v}), st.sampled_from(sorted(PLAIN)), JSON_LIKE),
    )
)
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_a_manifest_or_a_typed_error(data: bytes) -> None:
    try:
        assert encode_manifest(decode_manifest(data)) == data
    except TessellaError:
        return


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
    assert decode_manifest(encode_manifest(manifest)) == manifest


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


def test_the_costs_of_a_tied_model_count_its_embedding_at_both_ends_but_once_in_a_whole() -> None:
    costs = StageCosts((10, 20, 30), embedding_bytes=100, head_bytes=103, shared_bytes=100)
    assert costs.range_bytes(LayerRange(0, 1)) == 110
    assert costs.range_bytes(LayerRange(1, 2)) == 20
    assert costs.range_bytes(LayerRange(1, 3)) == 153
    assert costs.range_bytes(LayerRange(0, 3)) == 163


def test_the_real_artifact_is_what_its_parts_say(smollm2_path: Path) -> None:
    with Artifact.open(smollm2_path) as artifact:
        layers = artifact.config.all_layers
        assert artifact.model_id == "smollm2-135m-instruct"
        assert len(artifact.costs.layer_bytes) == artifact.config.layers == 30
        assert artifact.costs.range_bytes(layers) == sum(info.size_bytes for info in artifact.file.tensors.values())
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
