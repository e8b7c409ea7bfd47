"""Compiling a grammar where it can do no harm first (shell).

llguidance counts most of what it does, and gives up in time; but a short schema can still make it intersect automata for minutes, or
fill the memory (``multipleOf: 999983``: 43 s and 370 MB; thirty patterns under ``allOf``: no end was seen). A thread cannot be stopped,
a process can. So each grammar is compiled in a process of its own before it is compiled here: 0.1 s, once, for the verdict is kept.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path

from tessella_p2p.base.errors import InvalidRequest, Overloaded
from tessella_p2p.base.limits import (
    GRAMMAR_TRIAL_BYTES,
    GRAMMAR_TRIAL_CPU_S,
    GRAMMAR_TRIAL_S,
    MAX_REMEMBERED_TRIALS,
    MIB,
)
from tessella_p2p.wire.messages import Grammar

READY = b"ready"
"""What the process says once it can begin."""
_CHILD = Path(__file__).with_name("grammar_trial_child.py")


class GrammarTrial:
    """Compiles grammars in processes that may be killed. May be shared between threads."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[bytes, bool] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, grammar: Grammar) -> None:
        """Return if ``grammar`` compiles within bounds, or fails within them. Blocking.

        Raises:
            InvalidRequest: it takes too much.
            Overloaded: this machine could not find out in time.
        """
        key = hashlib.sha256(f"{grammar.kind}\n{grammar.text}".encode()).digest()
        with self._lock:
            verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = _is_bounded(grammar)
        with self._lock:
            self._verdicts[key] = verdict
            self._verdicts.move_to_end(key)
            if len(self._verdicts) > MAX_REMEMBERED_TRIALS:
                self._verdicts.popitem(last=False)
        if not verdict:
            raise InvalidRequest(
                f"the grammar: it takes over {GRAMMAR_TRIAL_CPU_S} s or {GRAMMAR_TRIAL_BYTES // MIB} MiB to compile",
                "grammar",
            )


def _is_bounded(grammar: Grammar) -> bool:
    command = [sys.executable, "-I", str(_CHILD), grammar.kind, str(GRAMMAR_TRIAL_CPU_S), str(GRAMMAR_TRIAL_BYTES)]
    try:
        done = subprocess.run(
            command,
            input=grammar.text.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=GRAMMAR_TRIAL_S,
            start_new_session=True,  # a Ctrl-C is for the node
            check=False,
            env={},
        )
    except subprocess.TimeoutExpired:
        raise Overloaded(f"a grammar could not be tried within {GRAMMAR_TRIAL_S:g} s; try again") from None
    except OSError as error:
        raise Overloaded(f"no grammar can be tried here: {error}") from None
    if done.stdout != READY:  # it never came to the grammar: llguidance is not to be found there, say
        raise Overloaded(f"no grammar can be tried here: the process for it ended early, with {done.returncode}")
    return done.returncode == 0
