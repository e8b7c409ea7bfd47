"""llama.cpp, built from the sources in the ``llama-cpp-python`` sdist: once a machine, into the user's cache folder.

The build takes ten minutes or more on two cores. It happens when a group first needs it, goes on where it was interrupted, and the
finished folder appears under its name in one step.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import platformdirs

from benchmarks.results import BenchmarkError

VERSION: Final = "0.3.36"
"""Of llama-cpp-python, whose sdist carries llama.cpp's sources."""
TOOLS: Final = ("llama-bench", "llama-batched-bench", "ggml-rpc-server", "llama-quantize")
_OPTIONS: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON",  # so that the tools find their libraries wherever the folder is
    "-DGGML_NATIVE=ON",
    "-DGGML_RPC=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
)
_ERROR_TAIL_LINES: Final = 12
_PROGRESS: Final = re.compile(r"\[\s*(\d+)(?:/(\d+)|%)\]")

Report = Callable[[str], None]


def cache_dir() -> Path:
    """Where builds and requantised models are kept."""
    return platformdirs.user_cache_path("tessella-p2p", appauthor=False) / "benchmarks"


def build_key(cpu: str) -> str:
    """The folder's name for a build for this CPU: ``GGML_NATIVE`` makes code that another one may not run.

    Args:
        cpu: whatever tells CPUs apart, see `cpu_description`.
    """
    return f"llama.cpp-{VERSION}-{platform.machine()}-{hashlib.sha256(cpu.encode()).hexdigest()[:8]}"


def cpu_description() -> str:
    """The model and the instruction set of this CPU, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def built_tools(report: Report) -> Path:
    """The folder with llama.cpp's programs; builds them when they are not there yet. Blocks.

    Raises:
        BenchmarkError: a tool or the network is missing, or the build failed; says what to do.
    """
    cache = cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    finished = cache / build_key(cpu_description())
    if finished.is_dir():
        return finished
    with _lock(cache / f"{finished.name}.lock"):
        if not finished.is_dir():
            _check_tools()
            work = cache / f"{finished.name}.build"
            source = _unpacked_source(work, report)
            configure(source, work / "build", report)
            compile_tools(work / "build", report)
            install(work / "build", finished)
            shutil.rmtree(work)
    return finished


def _check_tools() -> None:
    if shutil.which("cmake") is None:
        raise BenchmarkError("llama.cpp cannot be built here: there is no cmake; install it, then run this again")
    compilers = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    if not any(shutil.which(compiler) for compiler in compilers if compiler):
        raise BenchmarkError("llama.cpp cannot be built here: there is no C++ compiler (g++ or clang++); install one")


def _unpacked_source(work: Path, report: Report) -> Path:
    """``vendor/llama.cpp`` of the sdist; complete, or not there at all."""
    source = work / "source"
    if source.is_dir():
        return source
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        report(f"llama.cpp: fetching the sources of llama-cpp-python {VERSION}")
        pinned = f"llama-cpp-python=={VERSION}"
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            ":all:",
            "--dest",
            scratch,
        ]
        _run([*pip, pinned], f"the sources of {pinned} cannot be fetched")
        (archive,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as sdist:
            sdist.extractall(scratch, _vendored(sdist), filter="data")
        (vendor,) = Path(scratch).glob("*/vendor/llama.cpp")
        vendor.rename(source)
    return source


def _vendored(sdist: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in sdist.getmembers():
        if member.name.split("/")[1:3] == ["vendor", "llama.cpp"]:
            yield member


def configure(source: Path, build: Path, report: Report) -> None:
    """Run cmake's first half.

    Raises:
        BenchmarkError: it failed; the message ends with what it said.
    """
    report("llama.cpp: configuring")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    command = ["cmake", "-S", str(source), "-B", str(build), *generator, *_OPTIONS]
    _run(command, "cmake cannot configure llama.cpp")


def compile_tools(build: Path, report: Report) -> None:
    """Compile `TOOLS`, saying every tenth how far it is.

    Raises:
        BenchmarkError: it failed; the message ends with what the compiler said.
    """
    jobs = os.cpu_count() or 1
    report(f"llama.cpp: compiling with {jobs} jobs (ten minutes or more on two cores; once for this machine)")
    command = ["cmake", "--build", str(build), "--parallel", str(jobs), "--target", *TOOLS]
    last_lines: list[str] = []
    tenth = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last_lines = [*last_lines[1 - _ERROR_TAIL_LINES :], line.rstrip()]
            done = progress_of(line)
            if done is not None and int(done * 10) > tenth:
                tenth = int(done * 10)
                report(f"llama.cpp: {done:.0%} compiled")
    if process.returncode:
        raise BenchmarkError("llama.cpp does not compile here:\n" + "\n".join(last_lines))


def progress_of(line: str) -> float | None:
    """How much of a build a line of ninja (``[12/153]``) or make (``[ 12%]``) says is done, 0 to 1."""
    match = _PROGRESS.match(line)
    if match is None:
        return None
    done, total = int(match[1]), int(match[2] or 100)
    return done / total if total else None


def install(build: Path, finished: Path) -> None:
    """Keep the programs and their libraries; ``finished`` appears complete or not at all."""
    with tempfile.TemporaryDirectory(dir=finished.parent, prefix=f"{finished.name}.") as scratch:
        kept = Path(scratch) / "bin"
        kept.mkdir()
        for file in (build / "bin").iterdir():
            if file.name in TOOLS or ".so" in file.name or file.suffix == ".dylib":
                shutil.copy2(file, kept / file.name, follow_symlinks=False)
        missing = [tool for tool in TOOLS if not (kept / tool).is_file()]
        if missing:
            raise BenchmarkError(f"llama.cpp's build has no {', '.join(missing)}")
        kept.rename(finished)


def _run(command: Sequence[str], what_failed: str) -> None:
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if ended.returncode:
        tail = "\n".join(ended.stdout.splitlines()[-_ERROR_TAIL_LINES:])
        raise BenchmarkError(f"{what_failed}:\n{tail}")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Two benchmarks at the same time build once; the second finds the work done."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
