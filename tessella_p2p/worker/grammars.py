"""Compiling the grammars of sessions (shell): off the event loop, and one at a time: a slow one holds up other grammars alone."""

from __future__ import annotations

from functools import partial

from tessella_p2p.base.errors import InvalidRequest
from tessella_p2p.base.limits import GRAMMAR_WAIT_S
from tessella_p2p.ledger.blocking import OneAtATime, RunBlocking, in_thread
from tessella_p2p.model.grammar import Constraint, GrammarCompiler
from tessella_p2p.stages.sampler import answer_of
from tessella_p2p.wire.messages import ChainOpen


class Grammars:
    """What a node that draws, or repeats draws, needs of grammars.

    Args:
        compiler: of the model that the node serves; None refuses every grammar.
        run_blocking: how it is waited for.
    """

    def __init__(self, compiler: GrammarCompiler | None = None, run_blocking: RunBlocking = in_thread) -> None:
        self._compiler = compiler
        self._in_turn = OneAtATime(GRAMMAR_WAIT_S, "other grammars", run_blocking)

    async def constraint_of(self, body: ChainOpen) -> Constraint | None:
        """What the draws of an epoch have to follow, from its beginning on; None where there is no grammar.

        Cancelled while it compiles, it ends once that has ended: after `GRAMMAR_TRIAL_S` and as long again at most.

        Raises:
            InvalidRequest: the grammar is none, takes too much, or is not what the answer so far followed; or none is followed here.
            Overloaded: too many others are before it.
        """
        grammar = body.sampling.grammar
        if grammar is None:
            return None
        if self._compiler is None:
            raise InvalidRequest("this stage follows no grammar", "grammar")
        return await self._in_turn(partial(self._compiler.compile, grammar, answer_of(body)))
