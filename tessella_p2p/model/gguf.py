"""Reader for GGUF files, versions 2 and 3 (ggml's ``docs/gguf.md``), over a read-only memory map.

    magic "GGUF" · u32 version · u64 tensors · u64 metadata pairs
    metadata: key (string) · u32 type · value
    tensors:  name (string) · u32 dimensions · u64 each, columns first · u32 type · u64 offset into the data section
    data:     starts at the next multiple of ``general.alignment`` (32 unless the metadata say otherwise)

All numbers are little-endian. Only the header is parsed at `GgufFile.open`; a tensor's bytes are touched when it is read, so a
stage maps one shared file and pages in its own range. Every length is compared with the bytes that are left before anything is
allocated for it: any file gives a `GgufFile` or an `ArtifactError`.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Final, Self

from tessella_p2p.base.errors import ArtifactError, NotCertified
from tessella_p2p.base.limits import MAX_GGUF_ENTRIES, MAX_GGUF_STRING_BYTES

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32
_MAX_ALIGNMENT: Final = 1 << 16
_MAX_DIMENSIONS: Final = 4
_MAX_ARRAY_DEPTH: Final = 2
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING: Final = 8
_ARRAY: Final = 9
_BOOL: Final = 7
_SCALARS: Final[Mapping[int, str]] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


class GgmlType(IntEnum):
    """How a tensor's numbers are stored; the values are ggml's."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    BF16 = 30

    @property
    def block_elements(self) -> int:
        """Elements that share one block of scales."""
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return _BLOCKS[self][1]


_BLOCKS: Final[Mapping[GgmlType, tuple[int, int]]] = {
    GgmlType.F32: (1, 4),
    GgmlType.F16: (1, 2),
    GgmlType.BF16: (1, 2),
    GgmlType.Q4_0: (32, 18),
    GgmlType.Q4_1: (32, 20),
    GgmlType.Q5_0: (32, 22),
    GgmlType.Q5_1: (32, 24),
    GgmlType.Q8_0: (32, 34),
    GgmlType.Q2_K: (256, 84),
    GgmlType.Q3_K: (256, 110),
    GgmlType.Q4_K: (256, 144),
    GgmlType.Q5_K: (256, 176),
    GgmlType.Q6_K: (256, 210),
    GgmlType.IQ4_NL: (32, 18),
    GgmlType.IQ4_XS: (256, 136),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file.

    ``shape`` is row-major, rows first: ``(rows, columns)`` for a matrix, ``(n,)`` for a vector. ``offset`` counts from the start of
    the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: GgmlType
    offset: int
    size_bytes: int


class _Cursor:
    """Bounded reads from the header of one file."""

    __slots__ = ("data", "end", "name", "offset")

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data = data
        self.name = name
        self.offset = 0
        self.end = len(data)

    def fail(self, what: str) -> ArtifactError:
        return ArtifactError(f"{self.name}: {what} at byte {self.offset}; the file is damaged, fetch it again")

    def need(self, size_bytes: int, what: str) -> None:
        if size_bytes > self.end - self.offset:
            left = self.end - self.offset
            raise self.fail(f"truncated: {what} needs {size_bytes} bytes, {left} are left")

    def u32(self, what: str) -> int:
        self.need(4, what)
        (value,) = _U32.unpack_from(self.data, self.offset)
        self.offset += 4
        return int(value)

    def u64(self, what: str) -> int:
        self.need(8, what)
        (value,) = _U64.unpack_from(self.data, self.offset)
        self.offset += 8
        return int(value)

    def string(self, what: str) -> str:
        size_bytes = self.u64(what)
        if size_bytes > MAX_GGUF_STRING_BYTES:
            raise self.fail(f"{what} of {size_bytes} bytes (at most {MAX_GGUF_STRING_BYTES} are accepted)")
        self.need(size_bytes, what)
        raw = self.data[self.offset : self.offset + size_bytes]
        try:
            value = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8") from error
        self.offset += size_bytes
        return value

    def value(self, kind: int, key: str, depth: int = 0) -> object:
        if kind == _STRING:
            return self.string(f"metadata {key!r}")
        if kind == _ARRAY:
            return self.array(key, depth)
        code = _SCALARS.get(kind)
        if code is None:
            raise self.fail(f"metadata {key!r} has the unknown type {kind}")
        return self.numbers(code, 1, key)[0]

    def numbers(self, code: str, count: int, key: str) -> tuple[object, ...]:
        size_bytes = count * struct.calcsize("<" + code)
        self.need(size_bytes, f"metadata {key!r}")
        values = struct.unpack_from(f"<{count}{code}", self.data, self.offset)
        self.offset += size_bytes
        return values

    def array(self, key: str, depth: int) -> tuple[object, ...]:
        if depth >= _MAX_ARRAY_DEPTH:
            raise self.fail(f"metadata {key!r} nests arrays over {_MAX_ARRAY_DEPTH} deep")
        kind = self.u32(f"metadata {key!r}")
        count = self.u64(f"metadata {key!r}")
        code = _SCALARS.get(kind)
        # The smallest string is its 8-byte length, the smallest nested array 12 bytes.
        least_bytes = struct.calcsize("<" + code) if code else 8 if kind == _STRING else 12
        self.need(count * least_bytes, f"metadata {key!r} with {count} elements")
        if code:
            return self.numbers(code, count, key)
        return tuple(self.value(kind, key, depth + 1) for _ in range(count))


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for _ in range(count):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise cursor.fail(f"metadata {key!r} stands there twice")
        kind = cursor.u32(f"metadata {key!r}")
        metadata[key] = cursor.value(kind, key)
    return metadata


def _read_tensor(cursor: _Cursor) -> TensorInfo:
    """One entry of the tensor table; its offset is still relative to the data section."""
    name = cursor.string("a tensor name")
    dimensions = cursor.u32(f"tensor {name!r}")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise cursor.fail(f"tensor {name!r} has {dimensions} dimensions (1 to {_MAX_DIMENSIONS} are accepted)")
    shape = tuple(cursor.u64(f"tensor {name!r}") for _ in range(dimensions))[::-1]
    number = cursor.u32(f"tensor {name!r}")
    offset = cursor.u64(f"tensor {name!r}")
    try:
        kind = GgmlType(number)
    except ValueError as error:
        raise NotCertified(f"{cursor.name}: tensor {name!r} has ggml type {number}, which no test certifies") from error
    if shape[-1] % kind.block_elements or 0 in shape:
        raise cursor.fail(f"tensor {name!r} of shape {shape} is no whole number of {kind.name} blocks")
    size_bytes = math.prod(shape) // kind.block_elements * kind.block_bytes
    return TensorInfo(name, shape, kind, offset, size_bytes)


class GgufFile:
    """An open GGUF file. A context manager; use `open` to make one.

    Attributes:
        path: where it is.
        metadata: the header's key/value pairs; arrays are tuples.
        tensors: the tensors by name, in the file's order.
        data_offset: where the data section starts; everything before it is the header.
        size_bytes: the whole file.
    """

    __slots__ = ("_bytes_read", "_map", "_view", "data_offset", "metadata", "path", "size_bytes", "tensors")

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        cursor = _Cursor(mapped, path.name)
        if mapped[:4] != MAGIC:
            raise cursor.fail("no GGUF magic")
        cursor.offset = 4
        version = cursor.u32("the version")
        if version not in VERSIONS:
            raise NotCertified(f"{path.name}: GGUF version {version}; versions {VERSIONS} are read")
        tensor_count, pair_count = cursor.u64("the tensor count"), cursor.u64("the metadata count")
        if max(tensor_count, pair_count) > MAX_GGUF_ENTRIES:
            raise cursor.fail(f"{tensor_count} tensors and {pair_count} metadata pairs are over {MAX_GGUF_ENTRIES}")
        metadata = _read_metadata(cursor, pair_count)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise cursor.fail(f"an alignment of {alignment!r}")
        entries = [_read_tensor(cursor) for _ in range(tensor_count)]
        self.path = path
        self.size_bytes = len(mapped)
        self.data_offset = -(-cursor.offset // alignment) * alignment
        self.metadata: Mapping[str, object] = MappingProxyType(metadata)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(self._place(cursor, entries, alignment))
        self._map = mapped
        self._view = memoryview(mapped)
        self._bytes_read: dict[str, int] = {}

    def _place(self, cursor: _Cursor, entries: list[TensorInfo], alignment: int) -> dict[str, TensorInfo]:
        """The tensors by name, with offsets into the file, each inside the file and none over another."""
        tensors: dict[str, TensorInfo] = {}
        for entry in entries:
            cursor.offset = self.data_offset + entry.offset
            if entry.name in tensors:
                raise cursor.fail(f"tensor {entry.name!r} stands there twice")
            if entry.offset % alignment:
                raise cursor.fail(f"tensor {entry.name!r} is not aligned to {alignment}")
            if cursor.offset + entry.size_bytes > self.size_bytes:
                raise cursor.fail(
                    f"truncated: tensor {entry.name!r} of {entry.size_bytes} bytes ends after the file ({self.size_bytes} bytes)"
                )
            tensors[entry.name] = TensorInfo(entry.name, entry.shape, entry.kind, cursor.offset, entry.size_bytes)
        end = self.data_offset
        for entry in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            cursor.offset = entry.offset
            if entry.offset < end:
                raise cursor.fail(f"tensor {entry.name!r} overlaps the one before it")
            end = entry.offset + entry.size_bytes
        return tensors

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map ``path`` and parse its header.

        Raises:
            ArtifactError: no file, or damaged; names the file, the entry and the offset.
            NotCertified: a version or a tensor type that this reader does not know.
        """
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ArtifactError(f"{path.name}: cannot be read ({error})") from error
        try:
            return cls(path, mapped)
        except ArtifactError:
            mapped.close()
            raise

    @property
    def bytes_read(self) -> Mapping[str, int]:
        """Bytes handed out per tensor since the file was opened; a tensor that was never read has no entry."""
        return MappingProxyType(self._bytes_read)

    def read(self, name: str) -> memoryview:
        """The bytes of one tensor, as a read-only view of the map (no copy).

        Raises:
            ArtifactError: the file has no such tensor.
        """
        info = self.tensors.get(name)
        if info is None:
            raise ArtifactError(f"{self.path.name}: there is no tensor {name!r}")
        self._bytes_read[name] = self._bytes_read.get(name, 0) + info.size_bytes
        return self._view[info.offset : info.offset + info.size_bytes]

    def close(self) -> None:
        """Let go of the map. A view that a caller still holds keeps the mapping alive until it goes, too."""
        self._view.release()
        try:
            self._map.close()
        except BufferError:
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
