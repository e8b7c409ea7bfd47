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

from tessella_p2p.base.errors import ArtifactError
from tessella_p2p.base.limits import CHUNK_BYTES
from tessella_p2p.model.config import EMBEDDING, OUTPUT_NORM, ModelConfig
from tessella_p2p.model.gguf import GgufFile, TensorInfo
from tessella_p2p.wire import cbor

VERSION: Final = 1
_CONTRACT: Final = "tessella-contract"


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
    """

    layer_bytes: tuple[int, ...]
    embedding_bytes: int
    head_bytes: int


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
    )
