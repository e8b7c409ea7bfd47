"""llama.cpp's own benchmarks as peers: ``llama-bench``, ``llama-batched-bench``, RPC servers, and a file in its fastest format."""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio

from benchmarks.llama_build import Report, built_tools, cache_dir
from benchmarks.results import BenchmarkError

_STARTED_S = 20.0
_POLL_S = 0.02
_ERROR_TAIL_LINES = 8


@dataclass(frozen=True, slots=True)
class Batched:
    """One row of the batched bench: so many sequences, each with its own prompt.

    Attributes:
        sequences: how many.
        prefill_s: seconds until all prompts are in and the last one's logits are there.
        decode_tok_s: tokens a second of all sequences together, while all of them decode.
    """

    sequences: int
    prefill_s: float
    decode_tok_s: float


def parse_bench(output: str) -> dict[tuple[int, int], float]:
    """``llama-bench -o json``: tokens a second by (prompt tokens, generated tokens).

    Raises:
        BenchmarkError: not its format.
    """
    try:
        rates = {(row["n_prompt"], row["n_gen"]): float(row["avg_ts"]) for row in json.loads(output)}
    except (ValueError, TypeError, KeyError) as error:
        raise BenchmarkError(f"llama-bench printed something else than its JSON: {output[:200]!r}") from error
    if not rates:
        raise BenchmarkError(f"llama-bench printed no row: {output[:200]!r}")
    return rates


def parse_batched(output: str) -> dict[int, Batched]:
    """``llama-batched-bench --output-format jsonl``: rows by the number of sequences; lines of its log are skipped.

    Raises:
        BenchmarkError: no row, or not its format.
    """
    rows: dict[int, Batched] = {}
    try:
        for line in output.splitlines():
            if line.startswith('{"n_kv_max"'):
                row = json.loads(line)
                rows[row["pl"]] = Batched(row["pl"], float(row["t_pp"]), float(row["speed_tg"]))
    except (ValueError, TypeError, KeyError) as error:
        raise BenchmarkError(f"llama-batched-bench printed something else than its JSON: {output[:200]!r}") from error
    if not rows:
        raise BenchmarkError(f"llama-batched-bench printed no row: {output[-200:]!r}")
    return rows


class LlamaCpp:
    """The programs of one build. Make it with `prepare`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    async def prepare(cls, report: Report) -> LlamaCpp:
        """Find the build, or make it (minutes).

        Raises:
            BenchmarkError: it cannot be built here; says why.
        """
        return cls(await trio.to_thread.run_sync(partial(built_tools, report)))

    @classmethod
    async def prepare_or_none(cls, report: Report) -> LlamaCpp | None:
        """The same; where it cannot be built, say so and go on without."""
        try:
            return await cls.prepare(report)
        except BenchmarkError as error:
            report(f"{error}\nwhat is compared with llama.cpp is left out")
            return None

    async def prefill_tok_s(self, model: Path, tokens: int, *, threads: int) -> float:
        """``llama-bench -p``: tokens a second of one prompt, after a warm-up of its own."""
        arguments = ["-m", str(model), "-p", str(tokens), "-n", "0", "-r", "1", "-t", str(threads), "-o", "json"]
        output = await self._output("llama-bench", arguments)
        return parse_bench(output)[tokens, 0]

    async def batched(
        self,
        model: Path,
        *,
        sequences: Sequence[int],
        prompt: int,
        generate: int,
        threads: int,
        rpc: Sequence[str] = (),
    ) -> Mapping[int, Batched]:
        """The batched bench, for each number of sequences; ``prompt`` tokens each, then ``generate`` each.

        Args:
            rpc: addresses of servers that hold all the layers between them; empty for this process alone.
        """
        room = max(sequences) * (prompt + generate)
        arguments = ["-m", str(model), "-c", str(room), "-b", "2048", "-ub", "512", "-t", str(threads)]
        arguments += ["-npp", str(prompt), "-ntg", str(generate), "-npl", ",".join(map(str, sequences))]
        arguments += ["--output-format", "jsonl"]
        if rpc:
            arguments += ["--rpc", ",".join(rpc), "-ngl", "99"]
        rows = parse_batched(await self._output("llama-batched-bench", arguments))
        if missing := set(sequences) - rows.keys():
            raise BenchmarkError(f"llama-batched-bench left out {sorted(missing)} sequences")
        return rows

    async def requantised(self, model: Path, kind: str, report: Report) -> Path:
        """``model`` in another format (kept in the cache); the embedding, which is the head too, in llama.cpp's choice for it."""
        digest = await trio.to_thread.run_sync(_sha256, model)
        wanted = cache_dir() / f"{model.stem}-{digest[:12]}-{kind.lower()}.gguf"
        if not wanted.exists():
            report(f"llama.cpp: requantising {model.name} to {kind}")
            part = wanted.with_suffix(".part")
            await self._output("llama-quantize", ["--allow-requantize", str(model), str(part), kind])
            part.rename(wanted)
        return wanted

    @asynccontextmanager
    async def rpc_servers(self, count: int) -> AsyncIterator[list[str]]:
        """Addresses of ``count`` servers on loopback with one thread each; they end with this context."""
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(self._rpc_server()) for _ in range(count)]

    @asynccontextmanager
    async def _rpc_server(self) -> AsyncIterator[str]:
        port = _free_port()
        command = [str(self._folder / "ggml-rpc-server"), "-H", "127.0.0.1", "-p", str(port), "-t", "1", "-d", "CPU"]
        server = await trio.lowlevel.open_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            await _wait_listening(server, port)
            yield f"127.0.0.1:{port}"
        finally:
            with trio.CancelScope(shield=True):
                server.terminate()
                await server.wait()

    async def _output(self, tool: str, arguments: Sequence[str]) -> str:
        """What a program prints on standard output.

        Raises:
            BenchmarkError: it failed; with the end of what it said.
        """
        ended: subprocess.CompletedProcess[bytes] = await trio.run_process(
            [str(self._folder / tool), *arguments], capture_stdout=True, capture_stderr=True, check=False
        )
        if ended.returncode:
            said = ended.stderr.decode(errors="replace").splitlines()[-_ERROR_TAIL_LINES:]
            raise BenchmarkError(f"{tool} ended with status {ended.returncode}:\n" + "\n".join(said))
        return ended.stdout.decode(errors="replace")


async def _wait_listening(server: trio.Process, port: int) -> None:
    """Until a connection is accepted. The server serves one client at a time, so ours is closed at once."""
    with trio.move_on_after(_STARTED_S):
        while server.poll() is None:
            try:
                stream = await trio.open_tcp_stream("127.0.0.1", port)
            except OSError:
                await trio.sleep(_POLL_S)
            else:
                await stream.aclose()
                return
    raise BenchmarkError(f"ggml-rpc-server does not listen on port {port} (status {server.poll()})")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: Any = probe.getsockname()[1]
    return int(port)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
