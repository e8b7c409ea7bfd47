"""The dashboard over HTTP: its files, and the stream of pictures."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

import pytest
import trio
import trio.testing

from tessella_p2p.base.clock import SystemClock
from tessella_p2p.base.errors import NoRoute
from tessella_p2p.base.limits import MAX_PICTURE_WATCHERS, MAX_PICTURE_WATCHERS_PER_KEY, PICTURED_RATE_S
from tessella_p2p.bridge.api_keys import ApiKeys, new_key
from tessella_p2p.bridge.app import create_app
from tessella_p2p.bridge.authorising import KeyRing
from tessella_p2p.bridge.dashboard_app import CONTENT_SECURITY_POLICY, DASHBOARD_PATHS, FILES
from tessella_p2p.bridge.node_view import NodeStatus
from tests.bridge.bridge_doubles import Caller, call, events_of
from tests.dashboard.dashboard_world import MODEL, WHOLE_MESH, PaperEntry, PaperNode, fly


@pytest.fixture
def autojump(autojump_clock: trio.testing.MockClock) -> trio.testing.MockClock:
    return autojump_clock


def app(entry: PaperEntry | None = None, **settings: Any) -> Any:
    return create_app(entry or PaperEntry(), PaperNode(stages=WHOLE_MESH), **settings)


async def watched(app: Any, seconds: float, headers: dict[str, str] | None = None) -> list[Any]:
    """The pictures that a client gets who leaves after ``seconds``."""
    client = Caller(app)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: client("GET", "/events", headers=headers))
        with trio.move_on_after(seconds):
            await trio.Event().wait()
        client.left.set()
    return list(events_of(b"".join(client.parts)))


@pytest.mark.parametrize("path", sorted(DASHBOARD_PATHS - {"/events"}))
async def test_each_file_is_served_with_its_type_its_etag_and_the_strict_policy(path: str) -> None:
    answered = await call(app(), "GET", path)
    name = path.removeprefix("/ui/") if path != "/" else "index.html"
    assert (answered.status, answered.headers["content-type"]) == (200, FILES[name])
    assert answered.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert answered.headers["cache-control"] == "no-cache"
    assert answered.body == (files("tessella_p2p.bridge") / "dashboard" / name).read_bytes()


async def test_who_has_a_file_gets_304_and_no_body() -> None:
    etag = (await call(app(), "GET", "/ui/mesh.js")).headers["etag"]
    for held in (etag, f'"other", {etag}', f"W/{etag}"):
        again = await Caller(app())("GET", "/ui/mesh.js", headers={"if-none-match": held})
        assert again is not None
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", etag)
        assert again.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    changed = await Caller(app())("GET", "/ui/mesh.js", headers={"if-none-match": '"other"'})
    assert changed is not None
    assert changed.status == 200


@pytest.mark.parametrize("path", ["/ui", "/ui/", "/ui/../app.py", "/ui/%2e%2e/app.py", "/ui/mesh.js/", "/ui/MESH.js"])
async def test_nothing_else_is_in_the_folder(path: str) -> None:
    assert (await call(app(), "GET", path)).status == 404


@pytest.mark.parametrize("path", sorted(DASHBOARD_PATHS))
async def test_the_dashboard_is_only_read(path: str) -> None:
    assert (await call(app(), "POST", path)).status == 405


def test_every_file_of_the_folder_is_served_and_no_page_has_inline_code_or_another_host() -> None:
    folder = files("tessella_p2p.bridge") / "dashboard"
    texts = {each.name: each.read_text() for each in folder.iterdir()}
    assert texts.keys() == FILES.keys()
    for name, text in texts.items():
        assert "//" not in text.replace("// ", "").replace("http://www.w3.org/2000/svg", ""), name
        assert "innerHTML" not in text, name
        assert " style=" not in text, name
        assert "<script>" not in text, name


async def test_a_picture_comes_at_once_and_then_each_second(autojump: object) -> None:
    entry = PaperEntry()
    fly(entry.requests, "req-1", round(time.time() * 1000), age_s=2, tokens=3)
    pictures = await watched(app(entry), 2.5)
    assert len(pictures) == 3
    for picture in pictures:
        assert picture["model"]["id"] == MODEL
        assert [flight["request_id"] for flight in picture["flights"]] == ["req-1"]
        assert len(picture["stages"]) == len(WHOLE_MESH)


async def test_requests_that_ended_long_ago_are_not_drawn(autojump: object) -> None:
    entry, now_ms = PaperEntry(), round(time.time() * 1000)
    fly(entry.requests, "old", now_ms, age_s=PICTURED_RATE_S + 60, tokens=5, end="stop")
    fly(entry.requests, "new", now_ms, age_s=20, tokens=5, end="stop")
    (picture,) = await watched(app(entry), 0.5)
    assert [flight["request_id"] for flight in picture["ended"]] == ["new"]


async def test_who_begins_to_look_has_the_model_proven_and_whoever_goes_on_looking_does_not(autojump: object) -> None:
    class Counting(PaperEntry):
        proven = 0

        async def check_ready(self) -> None:
            self.proven += 1
            raise NoRoute("nobody serves layers 12–22", missing=((12, 22),))

    entry = Counting()
    assert len(await watched(app(entry), 10.5)) == 11
    assert entry.proven == 1


async def test_a_head_request_for_the_stream_ends() -> None:
    answered = await call(app(), "HEAD", "/events")
    assert (answered.status, answered.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert answered.body == b""


async def test_only_so_many_watch_and_who_leaves_makes_room(autojump: object) -> None:
    shared = app()
    watchers = [Caller(shared) for _ in range(MAX_PICTURE_WATCHERS)]
    async with trio.open_nursery() as nursery:
        for watcher in watchers:
            nursery.start_soon(_watch(watcher))
        for watcher in watchers:
            await watcher.part_came.wait()
        refused = await call(shared, "GET", "/events")
        assert (refused.status, refused.json()["error"]["code"]) == (503, "overloaded")
        watchers[0].left.set()
        await trio.testing.wait_all_tasks_blocked()
        assert await watched(shared, 0.5)
        for watcher in watchers:
            watcher.left.set()


def _watch(client: Caller, headers: dict[str, str] | None = None) -> Callable[[], Awaitable[object]]:
    return lambda: client("GET", "/events", headers=headers)


async def test_one_key_does_not_take_the_places_of_all_who_watch(autojump: object) -> None:
    secret, key = new_key(os.urandom, label="alice", now_ms=SystemClock().unix_ms())
    other, other_key = new_key(os.urandom, label="bob", now_ms=SystemClock().unix_ms())
    shared = app(keys=KeyRing(ApiKeys((key, other_key)), SystemClock()))
    mine = {"authorization": f"Bearer {secret}"}
    watchers = [Caller(shared) for _ in range(MAX_PICTURE_WATCHERS_PER_KEY)]
    async with trio.open_nursery() as nursery:
        for watcher in watchers:
            nursery.start_soon(_watch(watcher, mine))
        for watcher in watchers:
            await watcher.part_came.wait()
        refused = await Caller(shared)("GET", "/events", headers=mine)
        assert refused is not None
        assert (refused.status, refused.json()["error"]["code"]) == (503, "overloaded")
        assert await watched(shared, 0.5, {"authorization": f"Bearer {other}"})
        watchers[0].left.set()
        await trio.testing.wait_all_tasks_blocked()
        assert await watched(shared, 0.5, mine)
        for watcher in watchers:
            watcher.left.set()


async def test_a_node_with_keys_shows_the_mesh_to_a_key_and_other_peoples_requests_without_names(
    autojump: object,
) -> None:
    now_ms = SystemClock().unix_ms()
    secret, key = new_key(os.urandom, label="alice", now_ms=now_ms)
    other, _ = other_key = new_key(os.urandom, label="bob", now_ms=now_ms)
    entry = PaperEntry()
    fly(entry.requests, "req-1", now_ms, age_s=2, tokens=3, caller=key.caller)
    guarded = app(entry, keys=KeyRing(ApiKeys([key, other_key[1]]), SystemClock()))
    assert (await call(guarded, "GET", "/events")).status == 401
    assert (await call(guarded, "GET", "/")).status == 200
    for given, name in ((secret, "req-1"), (other, None)):
        (picture,) = await watched(guarded, 0.5, {"authorization": f"Bearer {given}"})
        assert [flight["request_id"] for flight in picture["flights"]] == [name]
        assert ("req-1" in json.dumps(picture)) == (name is not None)


async def test_who_watches_with_a_key_that_is_revoked_sees_no_more_of_the_mesh(autojump: object) -> None:
    secret, key = new_key(os.urandom, label="alice", now_ms=SystemClock().unix_ms())
    ring = KeyRing(ApiKeys([key]), SystemClock())
    client = Caller(app(keys=ring))
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: client("GET", "/events", headers={"authorization": f"Bearer {secret}"}))
            await client.part_came.wait()
            ring.replace(ApiKeys())
    assert len(list(events_of(b"".join(client.parts)))) == 1


async def test_however_many_watch_the_mesh_is_drawn_twice_a_second(autojump: object) -> None:
    class Counting(PaperNode):
        num_drawn = 0

        def status(self) -> NodeStatus:
            self.num_drawn += 1
            return super().status()

    class VirtualClock:
        def unix_ms(self) -> int:
            return round(1000 * trio.current_time())

    node = Counting(stages=WHOLE_MESH)
    shared = create_app(PaperEntry(), node, clock=VirtualClock())
    async with trio.open_nursery() as nursery:
        for index in range(8):
            await trio.testing.wait_all_tasks_blocked()
            with trio.move_on_after(index / 8):
                await trio.Event().wait()
            nursery.start_soon(watched, shared, 5.0)
    assert 5 <= node.num_drawn <= 20
