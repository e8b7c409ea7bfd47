"""The dashboard as a browser shows it: what people see, with a mouse, a keyboard, a phone or a screen reader."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tessella_p2p.base.clock import SystemClock
from tessella_p2p.base.errors import NoRoute
from tessella_p2p.base.ids import PeerId
from tessella_p2p.bridge.api_keys import ApiKeys, new_key
from tessella_p2p.bridge.authorising import KeyRing
from tessella_p2p.entry.api import Caller
from tessella_p2p.entry.readiness import ModelReadiness
from tests.dashboard.dashboard_world import (
    ATTACK,
    HOLED_MESH,
    MIDDLE,
    MODEL,
    OWN,
    RECIPE,
    ROUTE,
    TAIL,
    WHOLE_MESH,
    BrowserThread,
    PaperEntry,
    PaperNode,
    Visit,
    bridge,
    fly,
    peer,
)

HOLE = ModelReadiness("no_route", None, ((12, 22),))
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


def busy() -> PaperEntry:
    """An entry with requests in flight and ended ones."""
    entry, now_ms = PaperEntry(), round(time.time() * 1000)
    fly(entry.requests, "req-8f21c0d4a9", now_ms, age_s=5, tokens=118)
    fly(entry.requests, "req-77aa02b1ce", now_ms, age_s=2, tokens=0)
    fly(entry.requests, "req-of-a-key", now_ms, age_s=9, tokens=60, per_s=8, caller=Caller("key-1"), reroutes=1)
    for index, end in enumerate(("stop", "length", "cancelled", "no_route")):
        age_s = 20 + 24 * index
        fly(entry.requests, f"req-ended-{index}", now_ms, age_s=age_s, tokens=200 + 40 * index, per_s=30, end=end)
    return entry


def drawn(page: Page) -> None:
    """Wait for the first picture."""
    expect(page.locator("#layers svg").first).to_be_visible()
    expect(page.locator("#link")).to_have_text("live")


def asked(page: Page, text: str = QUESTION) -> None:
    """Type a question as soon as a model can be asked, and send it with the keyboard."""
    expect(page.locator("#send")).to_be_enabled()
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def accessible(page: Page) -> None:
    """Nothing that axe-core knows to be wrong for people with a screen reader, a keyboard or weak eyes."""
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


@pytest.mark.parametrize(
    ("name", "dark", "width", "height"),
    [
        ("light", False, 1200, 900),
        ("dark", True, 1200, 900),
        ("phone", False, 390, 844),
        ("phone-dark", True, 360, 740),
    ],
)
def test_a_whole_mesh_is_shown(browser: BrowserThread, name: str, dark: bool, width: int, height: int) -> None:
    def look(visit: Visit) -> None:
        page = visit.page
        drawn(page)
        expect(page.locator("h1")).to_have_text(f"{MODEL} answers")
        expect(page.locator("#layers-said")).to_have_text("5 stages hold all 30 layers; each layer twice.")
        expect(page.locator("#layers .stage")).to_have_count(len(WHOLE_MESH))
        expect(page.locator("#layers .flight")).to_have_count(3)
        expect(page.locator("#layers .hole")).to_have_count(0)
        expect(page.locator("#layers .stage.own text")).to_have_text(re.compile("^this node"))
        expect(page.locator("#requests tr")).to_have_count(7)
        first = page.locator("#requests tr").first
        expect(first).to_contain_text("req-8f21c0d4a9")
        expect(first.locator(".route li")).to_have_text(
            [re.compile(r"^0–12 …h3aQdT 3\.2 ms"), re.compile("…mZ7nPk 6.9 ms"), re.compile("…tW5vYs 2.5 ms")]
        )
        expect(page.locator("#requests")).not_to_contain_text("req-of-a-key")
        expect(page.locator("#requests .failed")).to_have_text("failed: no_route")
        expect(page.locator("#figures")).to_contain_text("tier Standard")
        expect(page.locator("#rate svg")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        accessible(page)
        visit.shoot(f"mesh-{name}")

    with bridge(busy(), PaperNode(stages=WHOLE_MESH)) as server:
        browser.visit(server.url, look, dark=dark, width=width, height=height)


@pytest.mark.parametrize("dark", [False, True])
def test_a_hole_is_drawn_named_and_said(browser: BrowserThread, dark: bool) -> None:
    def look(visit: Visit) -> None:
        page = visit.page
        drawn(page)
        expect(page.locator("h1")).to_have_text(f"{MODEL} does not answer")
        expect(page.locator("#verdict-why")).to_contain_text("Nobody holds the layers 12–22.")
        expect(page.locator("[data-hole='12-22'] text")).to_have_text("layers 12–22: nobody")
        expect(page.locator("#layers svg")).to_have_attribute("aria-label", re.compile("Nobody holds 12–22"))
        accessible(page)
        visit.shoot("mesh-hole-dark" if dark else "mesh-hole")

    entry = PaperEntry(not_ready=NoRoute("nobody", missing=((12, 22),)))
    with bridge(entry, PaperNode(stages=HOLED_MESH, readiness=HOLE)) as server:
        browser.visit(server.url, look, dark=dark)


@pytest.mark.parametrize(
    ("readiness", "title"),
    [
        (ModelReadiness("old", 95.0), "answered 1 min 35 s ago"),
        (ModelReadiness("unproven"), "has not been tried yet"),
        (ModelReadiness("failed", None, ((12, 22),)), "does not answer"),
    ],
)
def test_what_is_not_known_is_not_claimed(browser: BrowserThread, readiness: ModelReadiness, title: str) -> None:
    with bridge(PaperEntry(), PaperNode(stages=WHOLE_MESH, readiness=readiness)) as server:
        browser.visit(server.url, lambda visit: expect(visit.page.locator("h1")).to_have_text(f"{MODEL} {title}"))


def test_a_hole_that_opens_shows_within_the_next_pictures(browser: BrowserThread) -> None:
    node = PaperNode(stages=WHOLE_MESH)

    def look(visit: Visit) -> None:
        drawn(visit.page)
        node.stages, node.readiness = HOLED_MESH, HOLE
        expect(visit.page.locator("[data-hole='12-22']")).to_be_visible()
        expect(visit.page.locator("h1")).to_have_text(f"{MODEL} does not answer")
        node.stages, node.readiness = WHOLE_MESH, replace(HOLE, state="ready", missing=())
        expect(visit.page.locator("#layers .hole")).to_have_count(0)
        expect(visit.page.locator("h1")).to_have_text(f"{MODEL} answers")

    with bridge(PaperEntry(), node) as server:
        browser.visit(server.url, look)


def test_names_from_peers_are_text_wherever_they_stand(browser: BrowserThread) -> None:
    evil = replace(MIDDLE, peer_id=PeerId(ATTACK))
    entry, now_ms = PaperEntry(), round(time.time() * 1000)
    route = tuple(replace(hop, peer_id=PeerId(ATTACK)) for hop in ROUTE)
    fly(entry.requests, ATTACK, now_ms, age_s=3, tokens=10, route=route)
    fly(entry.requests, "ended", now_ms, age_s=9, tokens=10, route=route, end=ATTACK)

    def look(visit: Visit) -> None:
        page = visit.page
        drawn(page)
        page.locator("summary").first.click()
        expect(page.locator("#stages")).to_contain_text(ATTACK)
        expect(page.locator("#requests")).to_contain_text(ATTACK)
        expect(page.locator("figcaption").nth(1)).to_have_text(f"Recipe {ATTACK}")
        for tag in ("img", "script"):
            expect(page.locator(f"body {tag}")).to_have_count(0)
        assert page.evaluate("window.fired") is None
        visit.shoot("mesh-attack")

    stages = (OWN, evil, TAIL, peer("zzz", 0, 15, recipe=ATTACK))
    with bridge(entry, PaperNode(stages=stages)) as server:
        browser.visit(server.url, look)


def test_the_policy_holds_against_markup_inline_code_and_other_hosts(browser: BrowserThread) -> None:
    def look(visit: Visit) -> None:
        page = visit.page
        drawn(page)
        with pytest.raises(Exception, match="TrustedHTML"):
            page.evaluate("document.querySelector('main').innerHTML = '<b>x</b>'")
        page.evaluate(
            """other => {
                 window.blocked = [];
                 document.addEventListener('securitypolicyviolation', event => {
                   window.blocked.push(event.effectiveDirective);
                 });
                 const script = document.createElement('script');
                 script.append('window.fired = 1');
                 document.body.append(script);
                 const image = new Image();
                 image.src = `${other}/x.png`;
                 document.body.append(image);
               }""",
            other.url,
        )
        ask = "other => fetch(other, {mode: 'no-cors'}).then(() => 'sent', () => 'kept')"
        assert page.evaluate(ask, other.url) == "kept"
        page.wait_for_function("window.blocked.length >= 3")
        assert page.evaluate("window.blocked.sort()") == ["connect-src", "img-src", "require-trusted-types-for"]
        assert page.evaluate("window.fired") is None
        visit.hosts.discard(urlsplit(other.url).netloc)  # Playwright reports a request that the policy then blocked

    with (
        bridge(PaperEntry(), PaperNode(stages=WHOLE_MESH)) as server,
        bridge(PaperEntry(), PaperNode()) as other,
    ):
        browser.visit(server.url, look, complaints=["Content Security Policy", "This document requires 'Trusted"])


def test_every_picture_has_its_table(browser: BrowserThread) -> None:
    def look(visit: Visit) -> None:
        page = visit.page
        drawn(page)
        for summary in page.locator("summary").all():
            summary.focus()
            page.keyboard.press("Enter")
        expect(page.get_by_role("table")).to_have_count(3)
        stages = page.get_by_role("region", name="Table of stages").get_by_role("row")
        expect(stages).to_have_count(1 + len(WHOLE_MESH))
        expect(stages.nth(5)).to_have_text(re.compile("12–30.*full.*4.*" + RECIPE))
        expect(page.get_by_role("region", name="Table of tokens a second").get_by_role("row")).to_have_count(1 + 12)
        accessible(page)
        visit.shoot("mesh-tables")

    with bridge(busy(), PaperNode(stages=WHOLE_MESH)) as server:
        browser.visit(server.url, look)


def test_a_folded_table_on_a_phone_is_still_a_table_to_a_screen_reader(browser: BrowserThread) -> None:
    def look(visit: Visit) -> None:
        drawn(visit.page)
        table = visit.page.get_by_role("region", name="Table of requests").get_by_role("table")
        expect(table.get_by_role("columnheader")).to_have_count(6)
        expect(table.get_by_role("rowheader")).to_have_count(7)
        expect(table.get_by_role("cell")).to_have_count(7 * 5)

    with bridge(busy(), PaperNode(stages=WHOLE_MESH)) as server:
        browser.visit(server.url, look, width=390, height=844)


def test_a_crowd_of_stages_is_drawn_as_far_as_there_is_room(browser: BrowserThread) -> None:
    crowd = [peer(f"n{row:02}{start:02}", start, start + 2) for row in range(20) for start in range(0, 30, 2)]

    def look(visit: Visit) -> None:
        drawn(visit.page)
        expect(visit.page.locator("#layers-said")).to_have_text("300 stages hold all 30 layers; each layer 20 times.")
        expect(visit.page.locator("#layers .stage")).to_have_count(12 * 15)
        expect(visit.page.locator("#layers .note")).to_have_text("and 76 stages more, in the table")
        visit.shoot("mesh-crowd")

    with bridge(PaperEntry(), PaperNode(stages=crowd)) as server:
        browser.visit(server.url, look)


def test_a_node_that_is_gone_is_said_to_be_gone(browser: BrowserThread) -> None:
    server = bridge(busy(), PaperNode(stages=WHOLE_MESH))

    def look(visit: Visit) -> None:
        drawn(visit.page)
        server.stop()
        expect(visit.page.locator("h1")).to_have_text("This node does not answer")
        expect(visit.page.locator("#verdict-why")).to_have_text(
            re.compile(r"^What follows is how it was at \d\d:\d\d:\d\d\.$")
        )
        expect(visit.page.locator("#link")).to_have_text(re.compile("^Asking again in"))
        visit.shoot("mesh-gone", whole=False)

    with server:
        browser.visit(server.url, look, complaints=["Failed to load resource"])


def test_an_answer_streams_and_shows_the_way_that_it_took(browser: BrowserThread) -> None:
    entry = PaperEntry()

    def look(visit: Visit) -> None:
        page = visit.page
        asked(page)
        expect(page.locator(".theirs .text")).to_have_text(ANSWER)
        expect(page.locator(".way li")).to_have_text(
            [re.compile(r"0–12.*…oWHead.*1\.5 ms"), re.compile(r"12–30.*…oWTail.*2\.5 ms")]
        )
        expect(page.locator(".told")).to_contain_text(
            "34.0 tokens a second · first token after 12.0 ms · paid, tier Standard"
        )
        expect(page.locator("#prompt")).to_be_focused()
        accessible(page)
        visit.shoot("chat", whole=False)
        asked(page, "And of Italy?")
        expect(page.locator(".theirs")).to_have_count(2)
        expect(page.locator(".told")).to_have_count(2)
        page.get_by_role("button", name="New conversation").click()
        expect(page.locator(".said")).to_have_count(0)

    with bridge(entry, PaperNode(stages=WHOLE_MESH)) as server:
        browser.visit(f"{server.url}/ui/chat.html", look, height=640)
    first, second = (request.messages for request in entry.asked)
    assert [message["content"] for message in first or ()] == [QUESTION]
    assert [message["content"] for message in second or ()] == [QUESTION, ANSWER, "And of Italy?"]


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop_ends_the_generation_on_the_node_and_keeps_what_was_said(browser: BrowserThread, how: str) -> None:
    entry = PaperEntry(hold_after=3)

    def look(visit: Visit) -> None:
        page = visit.page
        asked(page)
        expect(page.locator(".theirs .text")).to_have_text("The capital of")
        expect(page.locator("#send")).to_be_hidden()
        visit.shoot("chat-answering", whole=False)
        if how == "button":
            page.get_by_role("button", name="Stop").click()
        else:
            page.keyboard.press("Escape")
        expect(page.locator(".theirs .state")).to_have_text("stopped by you")
        expect(page.locator(".way li")).to_have_count(2)  # known from the answer's head
        expect(page.locator("#send")).to_be_visible()

    with bridge(entry, PaperNode(stages=WHOLE_MESH)) as server:
        browser.visit(f"{server.url}/ui/chat.html", look, height=640)
    assert entry.ends == ["cancelled"]


@pytest.mark.parametrize("fail_after", [0, 3])
def test_a_failure_is_said_where_the_answer_would_be(browser: BrowserThread, fail_after: int) -> None:
    failure = NoRoute("nobody serves layers 12–22 of <b>this</b>", missing=((12, 22),))
    entry = PaperEntry(fail_after=fail_after, failure=failure)

    def look(visit: Visit) -> None:
        asked(visit.page)
        expect(visit.page.locator(".failed .state")).to_have_text(
            f"No {'more' if fail_after else 'answer'}: nobody serves layers 12–22 of <b>this</b>"
        )
        expect(visit.page.locator("#send")).to_be_visible()
        visit.shoot("chat-failed", whole=False)

    with bridge(entry, PaperNode(stages=WHOLE_MESH)) as server:
        browser.visit(f"{server.url}/ui/chat.html", look, height=640, complaints=["503"])


def test_an_answer_with_markup_is_shown_as_it_was_written(browser: BrowserThread) -> None:
    entry = PaperEntry(words=("Look: ", ATTACK, "\n\n  indented"))

    def look(visit: Visit) -> None:
        asked(visit.page, ATTACK)
        expect(visit.page.locator(".told")).to_be_visible()
        for side, text in (("mine", ATTACK), ("theirs", f"Look: {ATTACK}\n\n  indented")):
            assert visit.page.locator(f".{side} .text").text_content() == text
        expect(visit.page.locator("body img")).to_have_count(0)
        assert visit.page.evaluate("window.fired") is None

    with bridge(entry, PaperNode(stages=WHOLE_MESH)) as server:
        browser.visit(f"{server.url}/ui/chat.html", look)


@pytest.mark.parametrize(("dark", "width"), [(True, 1200), (False, 390)])
def test_the_chat_looks_well_in_the_dark_and_on_a_phone(browser: BrowserThread, dark: bool, width: int) -> None:
    def look(visit: Visit) -> None:
        page = visit.page
        asked(page)
        expect(page.locator(".told")).to_be_visible()
        page.locator("summary").click()
        page.get_by_label("Temperature").fill("1.2")
        expect(page.locator("summary")).to_have_text(f"{MODEL} · temperature 1.2 · at most 512 tokens")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        accessible(page)
        visit.shoot("chat-dark" if dark else "chat-phone", whole=False)

    with bridge(PaperEntry(), PaperNode(stages=WHOLE_MESH)) as server:
        browser.visit(f"{server.url}/ui/chat.html", look, dark=dark, width=width, height=760)


def test_without_a_model_nothing_can_be_sent_until_there_is_one(browser: BrowserThread) -> None:
    entry = PaperEntry(not_ready=NoRoute("nobody", missing=((12, 22),)))

    def look(visit: Visit) -> None:
        expect(visit.page.locator("#link")).to_have_text("nothing answers right now")
        expect(visit.page.locator("#send")).to_be_disabled()
        visit.shoot("chat-nobody", whole=False)
        entry.not_ready = None
        expect(visit.page.locator("#send")).to_be_enabled()

    with bridge(entry, PaperNode(stages=HOLED_MESH)) as server:
        browser.visit(f"{server.url}/ui/chat.html", look, height=640)


@pytest.mark.parametrize("page_path", ["/", "/ui/chat.html"])
def test_a_node_that_wants_a_key_is_given_one_and_the_tab_keeps_it(browser: BrowserThread, page_path: str) -> None:
    secret, key = new_key(os.urandom, label="alice", now_ms=SystemClock().unix_ms())

    def look(visit: Visit) -> None:
        page = visit.page
        field = page.get_by_label("API key")
        field.fill("tsl-" + "A" * 43)
        page.keyboard.press("Enter")
        expect(page.locator("#key-why")).to_have_text(re.compile("^That key does not do: this API key is unknown here"))
        accessible(page)
        visit.shoot("key" if page_path == "/" else "key-chat", whole=False)
        field.fill(secret)
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#key")).to_be_hidden()
        expect(page.locator("#link")).to_have_text(re.compile("live|ready"))
        page.get_by_role("link", name="Chat" if page_path == "/" else "Mesh").click()
        expect(page.locator("#link")).to_have_text(re.compile("live|ready"))
        assert secret not in str(page.evaluate("Object.values(localStorage).join()"))

    ring = KeyRing(ApiKeys([key]), SystemClock())
    with bridge(PaperEntry(), PaperNode(stages=WHOLE_MESH), keys=ring) as server:
        browser.visit(f"{server.url}{page_path}", look, height=640, complaints=["401"])


def test_the_page_is_reached_with_the_keyboard_alone(browser: BrowserThread) -> None:
    def look(visit: Visit) -> None:
        page = visit.page
        drawn(page)
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the mesh")).to_be_focused()
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        expect(page.locator("summary").first).to_be_focused()

    with bridge(PaperEntry(), PaperNode(stages=WHOLE_MESH)) as server:
        browser.visit(server.url, look)
