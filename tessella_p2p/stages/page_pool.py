"""The pages of one stage's KV: which are free, which are held by sessions, which are kept as cached prefixes (pure).

A page is in one of three states:

======  =======  =========  ==================================================================
state   holders  published  leaves it by
======  =======  =========  ==================================================================
free    0        no         `take`
held    1 or     maybe      `release` by its last holder: cached if it is published, else free
        more
cached  0        yes        `share` by its digest, or `take` once no page is free
======  =======  =========  ==================================================================

A published page is full and never written again, so any number of sessions may hold it. Nothing here clears a page: whoever holds
one reads no position that it has not written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tessella_p2p.stages.engine import Buffer


@dataclass(frozen=True, slots=True)
class PublishedPage:
    """A full page that sessions may share.

    Attributes:
        digest: of the scope and of every row from the session's first to the page's last.
        outputs: what the stage sent on for the page's rows; empty at a tail.
    """

    digest: bytes
    outputs: Buffer


class PagePool:
    """Takes, shares and releases pages, each in constant time.

    Args:
        num_pages: pages are numbered from 0 up to this.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # The lowest page is taken first, and one that was just released before one that was never used: memory is committed late.
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._published: dict[int, PublishedPage] = {}
        self._by_digest: dict[bytes, int] = {}
        self._cached: dict[int, None] = {}
        """Pages without a holder that are published, in the order in which they lost their last holder."""

    @property
    def num_free(self) -> int:
        """Pages with nothing in them."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Published pages that nobody holds."""
        return len(self._cached)

    @property
    def num_published(self) -> int:
        """Published pages, held ones included."""
        return len(self._published)

    @property
    def num_available(self) -> int:
        """Pages that `take` can give."""
        return len(self._free) + len(self._cached)

    def take(self) -> int:
        """A page for one holder: a free one, or the cached one that has had no holder for longest, which is forgotten.

        The caller has seen to it that one is available.
        """
        if self._free:
            page = self._free.pop()
        else:
            page = next(iter(self._cached))
            del self._cached[page]
            del self._by_digest[self._published.pop(page).digest]
        self._holders[page] = 1
        return page

    def share(self, digest: bytes) -> int | None:
        """The page that is published under ``digest``, with one more holder; None when there is none."""
        page = self._by_digest.get(digest)
        if page is not None:
            if not self._holders[page]:
                del self._cached[page]
            self._holders[page] += 1
        return page

    def release(self, pages: Sequence[int]) -> None:
        """Take one holder off each of a session's pages, which are in the order of their positions.

        The last page counts as the longest unused, because a prefix is of use only from its first page on.
        """
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                if page in self._published:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def publish(self, page: int, digest: bytes, outputs: Buffer) -> bool:
        """Let others share a full page that is held. False, and nothing changes, when another page has the digest already."""
        if digest in self._by_digest:
            return False
        self._by_digest[digest] = page
        self._published[page] = PublishedPage(digest, outputs)
        return True

    def holders(self, page: int) -> int:
        """How many sessions hold a page."""
        return self._holders[page]

    def published(self, page: int) -> PublishedPage | None:
        """What a page is published as; None for a page that is not."""
        return self._published.get(page)
