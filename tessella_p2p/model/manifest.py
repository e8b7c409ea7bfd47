"""The name of an artifact: what tensors it holds, and a hash of each MiB, under one root.

Whoever knows the root (32 bytes) can check a manifest, and with the manifest any chunk, from any peer, alone. The manifest's bytes are
canonical CBOR, so one artifact has one root. Everything here is pure but `build_manifest`, which reads the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessella_p2p.base.errors import ArtifactError, MalformedMessage, VersionMismatch
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import CHUNK_BYTES, MAX_ARTIFACT_BYTES, MAX_GGUF_ENTRIES, MAX_MANIFEST_BYTES
from tessella_p2p.model.config import EMBEDDING, OUTPUT_NORM, ModelConfig
from tessella_p2p.model.gguf import GgmlType, GgufFile, TensorInfo
from tessella_p2p.wire import cbor

VERSION: Final = 1
_CONTRACT: Final = "tessella-contract"
_MAX_NAME_CHARS: Final = 256
_MAX_DIMENSIONS: Final = 4
_MAX_ITEMS: Final = 4_000_000


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an artifact is, byte for byte.

    Attributes:
        size_bytes: of the file.
        tensors: its tensors, in the order of their offsets.
        chunks: SHA-256 of each `CHUNK_BYTES` of the file; the last one may be shorter.
    """

    size_bytes: int
    tensors: tuple[TensorInfo, ...]
    chunks: tuple[bytes, ...]

    def chunk_range(self, tensor: TensorInfo) -> range:
        """The chunks that hold a tensor's bytes."""
        return range(tensor.offset // CHUNK_BYTES, -(-(tensor.offset + tensor.size_bytes) // CHUNK_BYTES))


def encode_manifest(manifest: Manifest) -> bytes:
    """The canonical bytes of a manifest."""
    tensors = [[t.name, t.kind.name, list(t.shape), t.offset, t.size_bytes] for t in manifest.tensors]
    return cbor.encode(
        {
            "version": VERSION,
            "size_bytes": manifest.size_bytes,
            "chunk_bytes": CHUNK_BYTES,
            "tensors": tensors,
            "chunks": list(manifest.chunks),
        }
    )


def root(manifest: Manifest) -> bytes:
    """The artifact's name: SHA-256 of the manifest's canonical bytes."""
    return hashlib.sha256(encode_manifest(manifest)).digest()


def contract_hash(tensors: Iterable[TensorInfo]) -> bytes:
    """SHA-256 over the names, shapes and types of the tensors alone: equal for two fine-tunings of one model.

    The order of ``tensors`` does not matter, nor where they lie in a file.
    """
    entries = sorted([t.name, t.kind.name, list(t.shape)] for t in tensors)
    return hashlib.sha256(cbor.encode([_CONTRACT, VERSION, entries])).digest()


def decode_manifest(data: bytes, expected_root: bytes | None = None) -> Manifest:
    """The manifest whose canonical bytes a peer sent.

    Args:
        data: the bytes.
        expected_root: what they must hash to, where it is known.

    Raises:
        VersionMismatch: another version of the format.
        MalformedMessage: no manifest, or not the one that ``expected_root`` names.
    """
    if expected_root is not None and hashlib.sha256(data).digest() != expected_root:
        raise MalformedMessage(f"the bytes are not the manifest {expected_root.hex()}")
    fields = cbor.decode(data, MAX_MANIFEST_BYTES, _MAX_ITEMS)
    if not isinstance(fields, dict) or "version" not in fields:
        raise MalformedMessage("no manifest")
    if fields["version"] != VERSION:
        raise VersionMismatch(f"manifest version {str(fields['version'])[:20]}; this node reads version {VERSION}")
    if (
        fields.keys() != {"version", "size_bytes", "chunk_bytes", "tensors", "chunks"}
        or fields["chunk_bytes"] != CHUNK_BYTES
    ):
        raise MalformedMessage("no manifest: other fields, or another chunk size")
    size_bytes, tensors, chunks = fields["size_bytes"], fields["tensors"], fields["chunks"]
    if not _is_size(size_bytes, MAX_ARTIFACT_BYTES):
        raise MalformedMessage("no manifest: its size is out of bounds")
    if not isinstance(chunks, list) or len(chunks) != -(-size_bytes // CHUNK_BYTES):
        raise MalformedMessage("no manifest: it has not one chunk for each MiB")
    if not all(isinstance(chunk, bytes) and len(chunk) == 32 for chunk in chunks):
        raise MalformedMessage("no manifest: a chunk's hash is not 32 bytes")
    if not isinstance(tensors, list) or len(tensors) > MAX_GGUF_ENTRIES:
        raise MalformedMessage("no manifest: its list of tensors is out of bounds")
    manifest = Manifest(size_bytes, _decode_tensors(tensors, size_bytes), tuple(chunks))
    if encode_manifest(manifest) != data:  # a number that is written as a float or a boolean
        raise MalformedMessage("no manifest: a field has the wrong type")
    return manifest


def _decode_tensors(entries: list[object], size_bytes: int) -> tuple[TensorInfo, ...]:
    tensors = tuple(_decode_tensor(entry) for entry in entries)
    end = 0
    for tensor in tensors:
        if tensor.offset < end:
            raise MalformedMessage(
                f"no manifest: tensor {tensor.name!r} overlaps the one before it, or is out of order"
            )
        end = tensor.offset + tensor.size_bytes
    if end > size_bytes or len({tensor.name for tensor in tensors}) != len(tensors):
        raise MalformedMessage("no manifest: a tensor is outside of the file, or stands there twice")
    return tensors


def _decode_tensor(entry: object) -> TensorInfo:
    if not isinstance(entry, list) or len(entry) != 5:
        raise MalformedMessage("no manifest: a tensor has five fields")
    name, kind, shape, offset, size_bytes = entry
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_CHARS:
        raise MalformedMessage("no manifest: a tensor's name is out of bounds")
    if not isinstance(kind, str) or kind not in GgmlType.__members__:
        raise MalformedMessage(f"no manifest: tensor {name!r} has an unknown type")
    if not isinstance(shape, list) or not 0 < len(shape) <= _MAX_DIMENSIONS:
        raise MalformedMessage(f"no manifest: tensor {name!r} has no shape")
    if not all(_is_size(number, MAX_ARTIFACT_BYTES) for number in (*shape, offset, size_bytes)):
        raise MalformedMessage(f"no manifest: tensor {name!r} has a number that is out of bounds")
    info = TensorInfo(name, tuple(shape), GgmlType[kind], offset, size_bytes)
    if info.size_bytes * info.kind.block_elements != info.elements * info.kind.block_bytes:
        raise MalformedMessage(f"no manifest: tensor {name!r} has another size than its shape")
    return info


def _is_size(value: object, largest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= largest


def build_manifest(path: Path, file: GgufFile, progress: Callable[[int, int], None] | None = None) -> Manifest:
    """Hash a file. Blocking: about a second per GiB; call it on a thread.

    Args:
        path: the file.
        file: its parsed header.
        progress: called with (bytes done, bytes in all) after each chunk.

    Raises:
        ArtifactError: the file cannot be read, or changed since its header was.
    """
    chunks: list[bytes] = []
    done = 0
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                chunks.append(hashlib.sha256(chunk).digest())
                done += len(chunk)
                if progress:
                    progress(done, file.size_bytes)
    except OSError as error:
        raise ArtifactError(f"{path.name}: cannot be read ({error})") from error
    if done != file.size_bytes:
        raise ArtifactError(
            f"{path.name}: has {done} bytes now and had {file.size_bytes}; it changes while it is served"
        )
    tensors = tuple(sorted(file.tensors.values(), key=lambda tensor: tensor.offset))
    return Manifest(file.size_bytes, tensors, tuple(chunks))


@dataclass(frozen=True, slots=True)
class StageCosts:
    """What ranges of a model weigh, as the artifact stores them: what an allocator balances by.

    Attributes:
        layer_bytes: of each layer.
        embedding_bytes: what the head range needs beside its layers.
        head_bytes: what the tail range needs beside its layers: output norm and output matrix.
        shared_bytes: the part that is in both of them, a tied embedding: a range with both ends needs it once.
    """

    layer_bytes: tuple[int, ...]
    embedding_bytes: int
    head_bytes: int
    shared_bytes: int = 0

    def range_bytes(self, layers: LayerRange) -> int:
        """Bytes of a stage of ``layers``, with what the ends of the model need."""
        is_head, is_tail = layers.start == 0, layers.end == len(self.layer_bytes)
        total = sum(self.layer_bytes[layers.start : layers.end])
        return (
            total
            + is_head * self.embedding_bytes
            + is_tail * self.head_bytes
            - (is_head and is_tail) * self.shared_bytes
        )


def stage_costs(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> StageCosts:
    """The costs of every layer and of both ends.

    Args:
        config: the model's.
        tensors: its tensor table; `ModelConfig` has checked that it is complete.
    """
    head = tensors[OUTPUT_NORM].size_bytes + tensors[config.output_name].size_bytes
    embedding = tensors[EMBEDDING].size_bytes
    return StageCosts(
        layer_bytes=tuple(
            sum(tensors[name].size_bytes for name in config.layer_shapes(layer)) for layer in config.all_layers
        ),
        embedding_bytes=embedding,
        head_bytes=head,
        shared_bytes=embedding if config.tied_embedding else 0,
    )
