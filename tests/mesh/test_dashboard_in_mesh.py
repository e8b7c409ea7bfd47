"""The dashboard of a node of a real mesh, in a real browser: an answer with its way, and a worker that dies."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.dashboard.dashboard_world import BrowserThread, Visit, a_browser
from tests.mesh.mesh_thread import MeshThread

MODEL = "smollm2-135m-instruct"
OFFLINE_MS = 90_000.0
"""Until a worker that was killed counts as offline, on a busy machine."""


@pytest.fixture(scope="module")
def browser() -> Iterator[BrowserThread]:
    with a_browser() as browser:
        yield browser


def test_an_answer_shows_its_way_and_the_mesh_shows_the_request(f32_mesh: MeshThread, browser: BrowserThread) -> None:
    def look(visit: Visit) -> None:
        page = visit.page
        expect(page.locator("#send")).to_be_enabled(timeout=OFFLINE_MS)
        page.locator("summary").click()
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("At most").fill("24")
        page.fill("#prompt", "What is the capital of France?")
        page.press("#prompt", "Enter")
        expect(page.locator(".told")).to_contain_text("tokens a second", timeout=OFFLINE_MS)
        expect(page.locator(".theirs .text")).to_contain_text("Paris")
        hops = page.locator(".way li")
        expect(hops).to_have_count(3)
        for hop in hops.all():
            expect(hop).to_contain_text(re.compile(r"\d+–\d+.*\d ms"))
        request_id = page.locator(".told .peer").inner_text()
        visit.shoot("real-chat", whole=False)

        page.get_by_role("link", name="Mesh").click()
        expect(page.locator("h1")).to_have_text(f"{MODEL} answers")
        expect(page.locator("#layers-said")).to_have_text("3 stages hold all 30 layers; each layer once.")
        expect(page.locator("#layers .stage.own")).to_have_count(1)
        asked = page.locator("#requests tr").filter(has_text=request_id)
        expect(asked).to_contain_text("finished")
        expect(asked.locator(".route li")).to_have_count(3)
        expect(page.locator("#rate svg")).to_be_visible()
        visit.shoot("real-mesh")

    browser.visit(f"{f32_mesh.mesh.entry_url}/ui/chat.html", look, height=640)


def test_a_worker_that_dies_leaves_a_hole_that_is_shown_until_it_is_back(
    f32_mesh: MeshThread, browser: BrowserThread
) -> None:
    mesh = f32_mesh.mesh
    victim = mesh.workers[1]

    def look(visit: Visit) -> None:
        page = visit.page
        expect(page.locator("#link")).to_have_text("live")
        expect(page.locator("#layers .hole")).to_have_count(0)
        f32_mesh.call(mesh.stop, victim, signal.SIGKILL)
        expect(page.locator("#layers .hole")).to_have_count(1, timeout=OFFLINE_MS)
        expect(page.locator("h1")).to_have_text(f"{MODEL} does not answer", timeout=OFFLINE_MS)
        expect(page.locator("#verdict-why")).to_contain_text("Nobody holds the layers")
        visit.shoot("real-hole")
        f32_mesh.call(mesh.restart, victim)
        expect(page.locator("#layers .hole")).to_have_count(0, timeout=OFFLINE_MS)

    browser.visit(mesh.entry_url, look)
    f32_mesh.call(mesh.wait_healthy, OFFLINE_MS / 1000)
