"""What tables do where a screen is narrow, and where there is none."""

from __future__ import annotations

import io
from functools import partial

import pytest
import trio
from click.testing import CliRunner
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tessella_p2p.cli import why
from tessella_p2p.cli.asking import Answer
from tessella_p2p.cli.main import cli
from tessella_p2p.cli.tables import console
from tessella_p2p.cli.timeline import Told, rows_of
from tessella_p2p.cli.timing import show_timing
from tests.bridge.bridge_doubles import SpeakingEntry, app_for, serving
from tests.cli.test_why import answered

PEER = "12D3KooWQQnKirL4V2nvfnvhJzicNpsznh9k1htRGcT177VpeD8M"
ADDRESS = f"/ip4/203.0.113.123/tcp/19080/p2p/{PEER}"


async def told() -> Told:
    entry = SpeakingEntry()
    answered(entry.requests, "req-a")
    async with serving(app_for(entry)) as url:
        run = partial(CliRunner().invoke, cli, ["-a", url, "why", "req-a", "--json"])
        result = await trio.to_thread.run_sync(run)
    return Told.model_validate_json(result.stdout)


async def _long_status(_: Request) -> JSONResponse:
    return JSONResponse({"peer_id": PEER, "addresses": [ADDRESS]})


@pytest.mark.parametrize(("width", "is_whole"), [(None, True), ("40", False)])
async def test_what_is_long_is_whole_in_a_pipe_and_folded_on_a_narrow_screen(
    width: str | None, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    async with serving(Starlette(routes=[Route("/status", _long_status)])) as url:
        run = partial(CliRunner(env={"COLUMNS": width}).invoke, cli, ["-a", url, "status"])
        result = await trio.to_thread.run_sync(run)
    assert result.exit_code == 0, result.output
    assert (PEER in result.stdout, ADDRESS in result.stdout) == (is_whole, is_whole)
    assert "…" not in result.stdout
    assert PEER in "".join(line[len("addresses") :].strip() for line in result.stdout.splitlines())


def test_the_width_is_a_users_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "61")
    assert console().width == 61


@pytest.mark.parametrize("width", [24, 40, 60, 80, 200])
async def test_a_narrow_screen_takes_the_picture_of_a_request_and_leaves_its_numbers(width: int) -> None:
    request = await told()
    screen = io.StringIO()
    why.show(request, Console(file=screen, width=width, color_system=None, force_terminal=True))
    text = screen.getvalue()
    times = text.partition("\n\n")[2].partition("\n\n")[0]
    for row in rows_of(request):
        assert f"{row.end_ms - row.start_ms:.1f}" in times
    assert "…" not in times
    assert ("█" in times) == (width >= 60)


@pytest.mark.parametrize(("cached", "shown"), [(32, "32 of 35"), (64, "64"), (None, "–")])
def test_a_route_that_began_in_the_middle_of_an_answer_has_cached_more_than_the_prompt(
    cached: int | None, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hop = {"peer_id": PEER, "layers": [0, 19], "hop_ms": 1.0, "compute_ms": 1.0, "cached": cached}
    show_timing(Answer(usage={"prompt_tokens": 35, "completion_tokens": 9}, report={"route": [hop]}))
    assert capsys.readouterr().err.splitlines()[-1].split("1.00")[-1].strip() == shown
