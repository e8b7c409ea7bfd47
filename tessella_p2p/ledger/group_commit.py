"""Waiting callers share one transaction: what reaches the disk is one sync for all of them, not one for each.

Whoever comes first commits for itself; who comes while that goes on waits, and the first of those then commits for all that have
come by then. So nobody waits for a timer, and one caller alone pays for one commit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from tessella_p2p.base.errors import StorageError

T = TypeVar("T")
R = TypeVar("R")


class _Waiting(Generic[T, R]):
    __slots__ = ("error", "item", "results")

    def __init__(self, item: T) -> None:
        self.item = item
        self.results: list[R] = []
        """The one result, once it is there."""
        self.error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        return bool(self.results) or self.error is not None


class GroupCommit(Generic[T, R]):
    """Collects items of threads that wait.

    Args:
        commit: takes items, in the order in which they came, and returns their results, durable.
        max_items: so many at most are handed to it at once.
    """

    def __init__(self, commit: Callable[[Sequence[T]], Sequence[R]], max_items: int) -> None:
        self._commit = commit
        self._max_items = max_items
        self._list = threading.Lock()
        self._turn = threading.Lock()
        self._waiting: list[_Waiting[T, R]] = []

    @property
    def waiting(self) -> int:
        """How many items wait for the next commit."""
        with self._list:
            return len(self._waiting)

    def submit(self, item: T) -> R:
        """The result of ``item``, once it is durable; blocks.

        Raises:
            StorageError: the transaction that it was part of failed, and left nothing of it.
        """
        mine = _Waiting[T, R](item)
        with self._list:
            self._waiting.append(mine)
        while not mine.is_done:
            with self._turn:
                if not mine.is_done:
                    self._lead()
        if isinstance(mine.error, StorageError):
            # An error of its own for each caller: one that is raised in several threads collects all their tracebacks.
            raise StorageError(str(mine.error)) from mine.error
        if mine.error is not None:
            raise mine.error
        return mine.results[0]

    def _lead(self) -> None:
        with self._list:
            group, self._waiting = self._waiting[: self._max_items], self._waiting[self._max_items :]
        try:
            results = self._commit([one.item for one in group])
        except BaseException as error:  # noqa: BLE001 - whatever it is, each caller learns it
            for one in group:
                one.error = error
        else:
            for one, result in zip(group, results, strict=True):
                one.results.append(result)
