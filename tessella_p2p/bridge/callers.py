"""For whom a request is made, as what stands before the app has found out; pure."""

from __future__ import annotations

from typing import cast

from starlette.types import Scope

from tessella_p2p.entry.api import Caller


def caller_of(scope: Scope) -> Caller:
    """`authorising` says it where keys are asked for, and `traced` adds the trace; else it is the node's own user."""
    return cast(Caller, scope.get("state", {}).get("caller", Caller()))
