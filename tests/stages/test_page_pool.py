"""The page pool against a model that spells out every page's state."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tessella_p2p.stages.page_pool import PagePool

NUM_PAGES = 6


class PoolMachine(RuleBasedStateMachine):
    """Holders are lists of pages; the model keeps each page's holders, its digest, and the order of the cached ones."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.holders: list[list[int]] = []
        self.published: dict[int, bytes] = {}
        self.cached: list[int] = []

    def held(self) -> Counter[int]:
        return Counter(page for pages in self.holders for page in pages)

    @precondition(lambda self: self.pool.num_available > 0)
    @rule(holder=st.integers(0, 3))
    def take(self, holder: int) -> None:
        was_free = self.pool.num_free > 0
        page = self.pool.take()
        assert page not in self.held()
        if was_free:
            assert page not in self.cached
        else:
            assert page == self.cached.pop(0)
            del self.published[page]
        while len(self.holders) <= holder:
            self.holders.append([])
        self.holders[holder].append(page)

    @precondition(lambda self: self.held())
    @rule(data=st.data(), digest=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def publish(self, data: st.DataObject, digest: bytes) -> None:
        unpublished = sorted(set(self.held()) - set(self.published))
        if not unpublished:
            return
        page = data.draw(st.sampled_from(unpublished))
        taken = digest in self.published.values()
        assert self.pool.publish(page, digest, b"out " + digest) is not taken
        if not taken:
            self.published[page] = digest

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), digest=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def share(self, data: st.DataObject, digest: bytes) -> None:
        page = self.pool.share(digest)
        assert page == next((page for page, other in self.published.items() if other == digest), None)
        if page is None:
            return
        if page in self.cached:
            self.cached.remove(page)
        others = [pages for pages in self.holders if page not in pages]
        if not others:
            others = [[]]
            self.holders += others
        data.draw(st.sampled_from(others)).append(page)
        published = self.pool.published(page)
        assert published is not None
        assert published.outputs == b"out " + digest

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        pages = self.holders.pop(index)
        self.pool.release(pages)
        for page in reversed(pages):
            if page not in self.held() and page in self.published:
                self.cached.append(page)

    @invariant()
    def every_page_is_in_one_state(self) -> None:
        held = self.held()
        assert [self.pool.holders(page) for page in range(NUM_PAGES)] == [held[page] for page in range(NUM_PAGES)]
        assert self.pool.num_free + len(held) + self.pool.num_cached == NUM_PAGES
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_published == len(self.published)
        for page in range(NUM_PAGES):
            published = self.pool.published(page)
            assert (published and published.digest) == self.published.get(page)

    def teardown(self) -> None:
        for pages in self.holders:
            self.pool.release(pages)
        taken = {self.pool.take() for _ in range(NUM_PAGES)}
        assert taken == set(range(NUM_PAGES))
        assert (self.pool.num_available, self.pool.num_published) == (0, 0)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
