"""``tessella-p2p chat``: a prompt in, the answer as it comes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import click

from tessella_p2p.base.errors import MalformedMessage
from tessella_p2p.base.limits import MIB
from tessella_p2p.cli.main import EXIT_STATUS_HELP
from tessella_p2p.cli.node_client import NodeClient
from tessella_p2p.cli.options import ClientOptions
from tessella_p2p.cli.terminal import print_json, write_text

_MAX_STDIN_CHARS = 4 * MIB


@click.command(epilog=EXIT_STATUS_HELP)
@click.argument("words", nargs=-1)
@click.option("-p", "--prompt", help="The prompt; trailing words or standard input give it too.")
@click.option("-m", "--max-tokens", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("--temperature", type=click.FloatRange(0.0, 2.0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, at the end.")
@click.pass_obj
def chat(
    options: ClientOptions,
    words: tuple[str, ...],
    prompt: str | None,
    max_tokens: int,
    temperature: float,
    as_json: bool,
) -> None:
    """Ask a node. Ctrl-C stops the answer, on every stage of its route."""
    question = _question(prompt, words)
    with NodeClient(options.api_url) as node:
        model = options.model_id or node.model_id()
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text, reason, usage = "", None, None
        try:
            with closing(node.events("/v1/chat/completions", body)) as events:
                for event in events:
                    piece, ended = _piece_of(event)
                    text, reason, usage = text + piece, ended or reason, event.get("usage") or usage
                    if not as_json:
                        write_text(piece)
        finally:
            if text and not as_json:
                click.echo()
    if as_json:
        print_json({"model": model, "text": text, "finish_reason": reason, "usage": usage})
    elif reason == "length":
        click.echo(f"(cut at {max_tokens} tokens; -m sets more)", err=True)


def _question(prompt: str | None, words: tuple[str, ...]) -> str:
    if prompt is not None and words:
        raise click.UsageError("a prompt is given by --prompt or by trailing words, not by both")
    if prompt is None and not words:
        if sys.stdin.isatty():
            raise click.UsageError("what is the prompt? Give it as words, by --prompt or on standard input")
        prompt = sys.stdin.read(_MAX_STDIN_CHARS)
    question = " ".join(words) if prompt is None else prompt
    if not question.strip():
        raise click.UsageError("the prompt is empty")
    return question


def _piece_of(event: Mapping[str, Any]) -> tuple[str, str | None]:
    """Text and finish reason of one chunk; the chunk of the usage has neither."""
    try:
        if not event["choices"]:
            return "", None
        choice = event["choices"][0]
        return str(choice["delta"].get("content") or ""), choice.get("finish_reason")
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise MalformedMessage("an event of the node's stream is no chat chunk: is it a Tessella node?") from error
