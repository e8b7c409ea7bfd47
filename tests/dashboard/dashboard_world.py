"""What the dashboard is shown in its tests: meshes on paper behind the real server, and a browser to look at them."""

from __future__ import annotations

import os
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tessella_p2p.base.errors import Overloaded
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.bridge.app import create_app
from tessella_p2p.bridge.node_view import Credits, DeviceHealth, NodeStatus, PeerStatus, PeerView, ProofCounts
from tessella_p2p.entry.api import Caller, HopReport
from tessella_p2p.entry.readiness import ModelReadiness
from tessella_p2p.entry.requests import RequestBook, Trail
from tests.bridge.bridge_doubles import SpeakingEntry, StaticNode, serving
from tests.bridge.served_in_thread import ServerThread

MODEL = "smollm2-135m-instruct"
TOTAL_LAYERS = 30
RECIPE = "f32-x86"
OWN_ID = PeerId("12D3KooWQf5vWbYvK1xJp8nLr2mTtHcZ9eGdUaSoPi4hXeRy")
READY = ModelReadiness("ready", 2.0)
EVERYBODY = Caller()
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
PATIENCE_MS = 30_000.0
"""Of a look at a page; a busy machine is slow."""
VISIT_S = 300.0
ATTACK = '<img src=x onerror="window.fired=1"><script>window.fired=1</script>'

_BROWSERS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


def browser_path() -> str | None:
    """The Chromium of this machine; the variable ``TESSELLA_CHROMIUM`` may name another."""
    named = os.environ.get("TESSELLA_CHROMIUM")
    return named or next((path for path in map(shutil.which, _BROWSERS) if path), None)


@dataclass
class Visit:
    """One page in a context of its own, and what its console, its scripts and its requests said."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))

    def shoot(self, name: str, *, whole: bool = True) -> None:
        """Keep a picture of the page for whoever looks at what the tests saw."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=whole, animations="disabled")


class BrowserThread:
    """A browser with an empty profile, in a thread of its own: the asyncio loop of Playwright and those of trio stay apart."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._jobs: queue.SimpleQueue[tuple[Callable[[Browser], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="browser", daemon=True)

    def __enter__(self) -> BrowserThread:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _main(self) -> None:
        with tempfile.TemporaryDirectory() as home, sync_playwright() as playwright:
            environment: dict[str, str | float | bool] = {**os.environ, "HOME": home, "XDG_CONFIG_HOME": home}
            with playwright.chromium.launch(executable_path=self._path, args=list(_FLAGS), env=environment) as browser:
                expect.set_options(timeout=PATIENCE_MS)
                while (job := self._jobs.get()) is not None:
                    work, outcome = job
                    try:
                        outcome.set_result(work(browser))
                    except BaseException as error:  # noqa: BLE001 - handed to the thread that waits for it
                        outcome.set_exception(error)

    def visit(
        self,
        url: str,
        look: Callable[[Visit], None],
        *,
        dark: bool = False,
        width: int = 1200,
        height: int = 900,
        complaints: Sequence[str] = (),
    ) -> None:
        """Open ``url`` and ``look`` at it; anything on the console but ``complaints``, and any other host asked, fails."""

        def work(browser: Browser) -> None:
            with browser.new_context(
                viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
            ) as context:
                context.set_default_timeout(PATIENCE_MS)
                visit = Visit(context.new_page())
                visit.page.goto(url)
                look(visit)
                assert visit.hosts <= {urlsplit(url).netloc}
                unexpected = [line for line in visit.complaints if not any(known in line for known in complaints)]
                assert not unexpected

        outcome: Future[None] = Future()
        self._jobs.put((work, outcome))
        outcome.result(timeout=VISIT_S)


@contextmanager
def a_browser() -> Iterator[BrowserThread]:
    """For a session's fixture; without a Chromium its tests are skipped."""
    path = browser_path()
    if path is None:
        pytest.skip("no Chromium here (Debian: apt-get install chromium), so nobody looks at the pages")
    with BrowserThread(path) as browser:
        yield browser


@dataclass
class PaperEntry(SpeakingEntry):
    """A speaking entry, whose book of requests the test writes."""

    models: tuple[str, ...] = (MODEL,)


@dataclass
class PaperNode(StaticNode):
    """A node that sees the stages that the test gives it; ``own`` is its peer id."""

    stages: Sequence[PeerView] = ()
    own: PeerId = OWN_ID
    readiness: ModelReadiness = READY

    def status(self) -> NodeStatus:
        ranges = tuple(each for stage in self.stages if stage.peer_id == self.own for each in stage.layer_ranges)
        return replace(
            super().status(),
            peer_id=self.own,
            model=MODEL,
            recipe=RECIPE,
            layer_ranges=ranges,
            total_layers=TOTAL_LAYERS,
            readiness=self.readiness,
            device=DeviceHealth("cpu", healthy=True, memory_used_mb=412, memory_total_mb=4096),
            credits=Credits(182_400_000, "Standard"),
            proofs=ProofCounts(open=1, pending=2, settled=148, held=0, refused=1),
        )

    def peers(self, model_id: str | None) -> Sequence[PeerView]:
        return [stage for stage in self.stages if model_id in (None, stage.model_id)]


def peer(
    name: str, start: int, end: int, status: PeerStatus = "Healthy", recipe: str = RECIPE, **more: Any
) -> PeerView:
    """A peer that holds ``[start, end)``; its id ends with ``name``."""
    return PeerView(
        peer_id=PeerId(f"12D3KooWB8kLmNpQrStUvWxYz23456789ABCDEFGHJKL{name}"),
        model_id=MODEL,
        layer_ranges=(LayerRange(start, end),),
        status=status,
        queue_depth=more.pop("queue_depth", 0),
        recipe=recipe,
        addresses=(),
        **more,
    )


HEAD, MIDDLE, TAIL = peer("h3aQdT", 0, 12, queue_depth=2), peer("mZ7nPk", 12, 22), peer("tW5vYs", 22, 30)
OWN = replace(peer("own", 0, 12), peer_id=OWN_ID)
WHOLE_MESH = (
    *(OWN, HEAD, MIDDLE, TAIL),
    peer("r2SatU", 12, 30, "Saturated", queue_depth=4),
    peer("d9DrNg", 22, 30, "Draining"),
    peer("s6StLe", 0, 12, "Stale"),
)
HOLED_MESH = (OWN, TAIL, peer("o4OffL", 12, 22, "Offline"))
ROUTE = tuple(
    HopReport(stage.peer_id, stage.layer_ranges[0], hop_ms, hop_ms - 0.4)
    for stage, hop_ms in ((HEAD, 3.21), (MIDDLE, 6.875), (TAIL, 2.5))
)


def fly(
    book: RequestBook,
    name: str,
    now_ms: int,
    *,
    age_s: float,
    tokens: int,
    per_s: float = 25.0,
    end: str | None = None,
    route: tuple[HopReport, ...] = ROUTE,
    caller: Caller = EVERYBODY,
    reroutes: int = 0,
) -> Trail:
    """Write a request into ``book`` that came ``age_s`` ago, and had ``tokens`` since."""
    trail = book.begin(name, "answer", MODEL, caller, now=0.0, now_unix_ms=now_ms - round(1000 * age_s))
    trail.tokenised(12, 512, 0.01)
    trail.granted(name, "Standard", 0.02, paid=True)
    trail.placed(0.03)
    for epoch in range(reroutes + 1):
        if epoch:
            trail.rerouted(Overloaded("the stage is full"), 0.04)
        trail.opened(epoch, lambda: route, 0.05)
    for index in range(tokens):
        trail.token(0.3 + index / per_s)
    if end is not None:
        trail.end(end, 0.3 + tokens / per_s)
    return trail


def bridge(entry: PaperEntry, node: PaperNode, **settings: Any) -> ServerThread:
    """Their app behind the real server: Playwright's sync API has the test's own thread."""
    return ServerThread(lambda: serving(create_app(entry, node, **settings)))
