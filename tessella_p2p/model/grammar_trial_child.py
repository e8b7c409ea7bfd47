"""What `model.grammar_trial` runs, by its path and without this package: compile one grammar from stdin, or be killed over it.

Arguments: its kind, the seconds of CPU and the bytes of memory that this process may use. It says ``ready`` before it looks at the
grammar. The exit status is 0 whether it is one or not: that is found out again, and said, by whoever asked.
"""

from __future__ import annotations

import resource
import sys
from contextlib import suppress


class Bytes:
    """The smallest vocabulary: one token a byte, and an end. What compiling costs hardly depends on it."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"\xff<end>")

    def __call__(self, text: str) -> list[int]:
        """One id a byte."""
        return list(text.encode())


def main(kind: str, cpu_s: int, memory_bytes: int) -> None:
    """Compile what stdin holds, as far as its first mask."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError):  # not every system can bound it
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    sys.stdout.write("ready")
    sys.stdout.flush()
    text = sys.stdin.buffer.read().decode()
    limits = LLParserLimits(precompute_large_lexemes=False, verbose_errors=False)
    with suppress(ValueError):  # no JSON at all
        grammar = (
            LLMatcher.grammar_from_json_schema(text) if kind == "json_schema" else LLMatcher.grammar_from_lark(text)
        )
        matcher = LLMatcher(LLTokenizer(TokenizerWrapper(Bytes()), slices=[]), grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
