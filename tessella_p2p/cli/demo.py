"""``tessella-p2p demo``: a whole mesh on this machine, one question, and what it took to answer it."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import trio
from rich.console import Console, JustifyMethod
from rich.table import Table

from tessella_p2p.base.errors import ConfigurationError, TessellaError
from tessella_p2p.cli import asking
from tessella_p2p.cli.asking import Manner, Turn, chat_question, completion_question, take
from tessella_p2p.cli.demo_mesh import Mesh, MeshPlan, run_mesh
from tessella_p2p.cli.node_client import DONE, DataReader, event_of, parsed_answer
from tessella_p2p.cli.options import DemoOptions
from tessella_p2p.cli.status import short_peer_id

DEFAULT_PROMPT = "What is the capital of France?"

_HEALTHY_S = 180.0
_SETTLED_S = 20.0
_ANSWER_S = 600.0
_AUDITED_S = 120.0

Answer = dict[str, Any]


def run_demo(options: DemoOptions) -> None:
    """Run the demo to its end.

    Raises:
        TessellaError: a process did not come up, or the mesh could not answer.
    """
    prompts = _read_prompts(options.prompts) if options.prompts is not None else [options.prompt]
    try:
        trio.run(_run, options, prompts)
    except* TessellaError as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


def _read_prompts(path: Path) -> list[str | list[int]]:
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--prompts {path}: {error}") from error
    if not isinstance(items, list) or not items:
        raise ConfigurationError(
            f"--prompts {path}: a JSON list of prompts, or of objects with prompt_ids, is expected"
        )
    prompts: list[str | list[int]] = []
    for number, item in enumerate(items):
        ids = item.get("prompt_ids") if isinstance(item, dict) else None
        if isinstance(item, str):
            prompts.append(item)
        elif isinstance(ids, list) and ids and all(type(token) is int for token in ids):
            prompts.append(ids)
        else:
            raise ConfigurationError(
                f"--prompts {path}: item {number} is neither a string nor an object with prompt_ids"
            )
    return prompts


async def _run(options: DemoOptions, prompts: Sequence[str | list[int]]) -> None:
    console = Console(stderr=True, highlight=False)
    async with trio.open_nursery() as nursery:
        await nursery.start(_leave_on_sigterm, nursery.cancel_scope)
        began = trio.current_time()
        with tempfile.TemporaryDirectory(prefix="tessella-demo-", ignore_cleanup_errors=True) as home:
            plan = MeshPlan(
                home=Path(home),
                model=options.model,
                workers=options.workers,
                recipe=options.recipe,
                models_dir=options.models_dir,
                audit_share=1.0 if options.audits else None,
            )
            async with _progress(console, quiet=options.json) as report, run_mesh(plan, report) as mesh:
                report("waiting until the mesh is healthy")
                await mesh.wait_healthy(_HEALTHY_S)
                ready_s = trio.current_time() - began
                report("")
                await _ask_all(options, prompts, mesh, console, ready_s)
                if options.keep:
                    await _keep(options.model_id, mesh, console)
        nursery.cancel_scope.cancel()


async def _leave_on_sigterm(scope: trio.CancelScope, task_status: trio.TaskStatus[None]) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGHUP) as signals:
        task_status.started()
        async for _ in signals:
            scope.cancel()


@asynccontextmanager
async def _progress(console: Console, *, quiet: bool) -> AsyncIterator[Any]:
    """A reporter of one line of progress; an empty line ends it."""
    if quiet or not console.is_terminal:

        def plain(line: str) -> None:
            if line and not quiet:
                console.print(line)

        yield plain
        return
    with console.status("starting") as status:

        def live(line: str) -> None:
            if line:
                status.update(line)
                console.print(f"[dim]{line}[/dim]")
            else:
                status.stop()

        yield live


async def _ask_all(
    options: DemoOptions, prompts: Sequence[str | list[int]], mesh: Mesh, console: Console, ready_s: float
) -> None:
    answers: list[Answer] = []
    async with httpx.AsyncClient(base_url=mesh.entry_url, timeout=_ANSWER_S) as client:
        if options.parallel > 1:
            answers = await _ask_parallel(options, prompts, client)
        else:
            for prompt in prompts:
                answers.append(await _ask(options, prompt, client, console, echo=not options.json))
    routes = [[hop["peer_id"] for hop in answer["route"]] for answer in answers]
    statuses = sorted(await mesh.settled(routes, _SETTLED_S), key=_first_layer)
    earned = [_credits_of(status) for status in statuses]
    audits = await mesh.audited(sum(map(len, routes)), _AUDITED_S) if options.audits else None
    for answer in answers:
        answer["credits"] = earned
        answer["audits"] = audits
        answer["timings"] = {"ready_s": round(ready_s, 3), **answer["timings"]}
    if options.json:
        print(json.dumps(answers if options.prompts is not None else answers[0], ensure_ascii=False))  # noqa: T201
        sys.stdout.flush()
        return
    if options.parallel > 1:
        for answer in answers:
            console.print(answer["text"], markup=False)
    _show(console, answers[-1], statuses, ready_s)
    if audits is not None:
        found = ", ".join(f"{number} {word}" for word, number in sorted(audits.items()))
        console.print(f"Audits: {found or 'none ended in time'}.")


async def _ask_parallel(
    options: DemoOptions, prompts: Sequence[str | list[int]], client: httpx.AsyncClient
) -> list[Answer]:
    answers: dict[int, Answer] = {}
    limit = trio.CapacityLimiter(options.parallel)

    async def ask(index: int, prompt: str | list[int]) -> None:
        async with limit:
            answers[index] = await _ask(options, prompt, client, None, echo=False)

    async with trio.open_nursery() as nursery:
        for index, prompt in enumerate(prompts):
            nursery.start_soon(ask, index, prompt)
    return [answers[index] for index in range(len(prompts))]


async def _ask(
    options: DemoOptions, prompt: str | list[int], client: httpx.AsyncClient, console: Console | None, *, echo: bool
) -> Answer:
    """One request through the bridge, streamed; text is echoed on stdout as it comes."""
    manner = Manner(options.max_tokens, options.temperature)
    if isinstance(prompt, str):
        question = chat_question(options.model_id, [Turn("user", prompt)], manner)
        if echo and console is not None:
            console.print(f"\n[bold]> {prompt}[/bold]")
    else:
        question = completion_question(options.model_id, prompt, manner)
    said = asking.Answer()
    async with client.stream("POST", question.path, json=question.body) as answer:
        if answer.status_code != 200:
            parsed_answer(answer, await answer.aread())  # raises what the node says
        reader = DataReader(answer)
        async for part in answer.aiter_bytes():
            for data in reader.feed(part):
                piece = "" if data == DONE else take(event_of(data.decode(errors="replace")), said)
                if echo:
                    sys.stdout.write(piece)
                    sys.stdout.flush()
    if echo:
        sys.stdout.write("\n")
    report = said.report
    return {
        "text": said.text,
        "prompt_ids": report["prompt_ids"],
        "token_ids": report["token_ids"],
        "finish_reason": said.reason,
        "route": report["route"],
        "usage": said.usage,
        "credits": [],
        "audits": None,
        "timings": report["timings"],
        "request_id": report["request_id"],
        "tier": report["tier"],
        "paid": report["paid"],
    }


def _first_layer(status: Mapping[str, Any]) -> int:
    """For showing workers in the order of the route; those without a range come last."""
    ranges = status["layer_ranges"]
    return int(ranges[0][0]) if ranges else sys.maxsize


def _credits_of(status: Mapping[str, Any]) -> dict[str, Any]:
    ranges = status["layer_ranges"]
    return {
        "peer_id": status["peer_id"],
        "layers": ranges[0] if ranges else None,
        "credits": status["credits"]["credits"] if status["credits"] else 0,
    }


def _show(console: Console, answer: Answer, statuses: Sequence[Mapping[str, Any]], ready_s: float) -> None:
    route = Table(title="Route", title_justify="left", box=None, pad_edge=False)
    _add_columns(route, stage="right", peer="left", layers="right", ms_a_hop="right")
    for index, hop in enumerate(answer["route"]):
        start, end = hop["layers"]
        route.add_row(str(index), short_peer_id(hop["peer_id"]), f"{start}–{end}", f"{hop['hop_ms']:.2f}")
    earned = Table(title="Proofs and credits", title_justify="left", box=None, pad_edge=False)
    _add_columns(earned, worker="left", layers="right", proofs_settled="right", credits="right")
    for status in statuses:
        row = _credits_of(status)
        layers = "–".join(str(edge) for edge in row["layers"]) if row["layers"] else "none"
        earned.add_row(short_peer_id(row["peer_id"]), layers, str(status["proofs"]["settled"]), f"{row['credits']:.3f}")
    console.print()
    console.print(route)
    console.print()
    paid = "ticket minted by the orchestrator" if answer["paid"] else "no ticket: served unpaid"
    console.print(f"Request {answer['request_id']} ({paid}, tier {answer['tier']})")
    console.print()
    console.print(earned)
    timings = answer["timings"]
    console.print(
        f"\nReady after {ready_s:.1f} s; first token after {timings['ttft_ms']:.0f} ms; "
        f"then {timings['tokens_per_s']:.1f} tokens a second."
    )


def _add_columns(table: Table, **justified: JustifyMethod) -> None:
    for name, justify in justified.items():
        table.add_column(name.replace("_", " "), justify=justify)


async def _keep(model_id: str, mesh: Mesh, console: Console) -> None:
    url = mesh.entry_url
    console.print("\nThe mesh stays up until Ctrl-C.")
    for worker in mesh.workers:
        console.print(f"  {worker.name}  {worker.api_url}")
    body = json.dumps({"model": model_id, "messages": [{"role": "user", "content": DEFAULT_PROMPT}]})
    console.print(
        f"\n  curl -s {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n",
        markup=False,
        soft_wrap=True,
    )
    while True:
        for node in mesh.nodes:
            mesh.check(node)
        await trio.sleep(1.0)
