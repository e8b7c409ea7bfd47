"""``tessella-p2p chat``: a prompt in, the answer as it comes; once, in a conversation that a file keeps, or interactively."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import click

from tessella_p2p.cli.asking import Answer, Manner, Mode, completion_question, fim_question
from tessella_p2p.cli.main import EXIT_STATUS_HELP
from tessella_p2p.cli.node_client import NodeClient
from tessella_p2p.cli.options import ClientOptions
from tessella_p2p.cli.prompting import Asker, answer_options, checked, joined, read_stdin
from tessella_p2p.cli.talk import Talk, begun


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the options come to: exactly one of a prompt and a gap, or neither for an interactive talk that begins empty."""

    mode: Mode
    prompt: str | None
    gap: tuple[str, str] | None


@click.command(epilog=EXIT_STATUS_HELP)
@click.argument("words", nargs=-1)
@click.option("-p", "--prompt", help="The prompt; trailing words or standard input give it too.")
@click.option("-i", "--interactive", is_flag=True, help="Talk: with history, editing and commands; /help lists them.")
@click.option(
    "--session-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Go on with the conversation in this file, and keep it there.",
)
@click.option(
    "--mode",
    type=click.Choice(["chat", "completion", "fim"]),
    help="chat (the default), raw completion of the prompt, or fill-in-the-middle.",
)
@click.option("--prefix", help="Fill in the middle: what stands before the gap.")
@click.option("--suffix", help="Fill in the middle: what stands behind it.")
@answer_options
@click.pass_obj
def chat(
    options: ClientOptions,
    words: tuple[str, ...],
    prompt: str | None,
    interactive: bool,
    session_file: Path | None,
    mode: str | None,
    prefix: str | None,
    suffix: str | None,
    max_tokens: int,
    temperature: float,
    timing: bool,
    as_json: bool,
) -> None:
    """Ask a node. Ctrl-C stops the answer, on every stage of its route.

    A word that is just a dash stands for standard input: cat report.txt | tessella-p2p chat Sum this up: -
    """
    asked = _read(words, prompt, mode, prefix, suffix, interactive=interactive)
    _check_together(asked.mode, interactive=interactive, session_file=session_file, as_json=as_json)
    conversation = begun(session_file)
    with NodeClient(options.api_url, bearer=options.api_key) as node:
        model = options.model_id or conversation.model or node.model_id()
        manner = Manner(max_tokens, temperature)
        exact = asked.mode != "chat"
        asker = Asker(node, model, manner, timing=timing, as_json=as_json, exact=exact)
        talk = Talk(asker, conversation, session_file)
        if interactive:
            from tessella_p2p.cli.interactive import converse

            converse(talk, asked.mode, asked.prompt)
        elif asked.mode == "chat":
            assert asked.prompt is not None
            talk.say(asked.prompt)
        elif asked.gap is not None:
            asker.ask(fim_question(model, *asked.gap, manner), Answer())
        else:
            assert asked.prompt is not None
            asker.ask(completion_question(model, asked.prompt, manner), Answer())


def _read(
    words: tuple[str, ...],
    prompt: str | None,
    mode: str | None,
    prefix: str | None,
    suffix: str | None,
    *,
    interactive: bool,
) -> _Asked:
    has_gap = prefix is not None or suffix is not None
    chosen = cast(Mode, mode or ("fim" if has_gap else "chat"))
    if chosen == "fim":
        if prompt is not None or words:
            raise click.UsageError("fill-in-the-middle is asked by --prefix and --suffix, not by a prompt")
        return _Asked(chosen, None, read_gap(prefix, suffix))
    if has_gap:
        raise click.UsageError(f"--prefix and --suffix are for --mode fim, not for --mode {chosen}")
    if interactive and prompt is None and not words:
        return _Asked(chosen, None, None)
    return _Asked(chosen, _question(prompt, words), None)


def read_gap(prefix: str | None, suffix: str | None) -> tuple[str, str]:
    """What stands around a gap; a prefix that is not given comes on standard input, unless a terminal is there.

    Raises:
        UsageError: neither is given.
    """
    if prefix is None and not sys.stdin.isatty():
        prefix = read_stdin()
    if not prefix and not suffix:
        raise click.UsageError("what stands around the gap? Give --prefix, --suffix or both")
    return checked(prefix or ""), checked(suffix or "")


def _question(prompt: str | None, words: tuple[str, ...]) -> str:
    if prompt is not None and words:
        raise click.UsageError("a prompt is given by --prompt or by trailing words, not by both")
    if prompt is None and not words:
        if sys.stdin.isatty():
            raise click.UsageError("what is the prompt? Give it as words, by --prompt or on standard input")
        question = read_stdin()
    else:
        question = joined(words if prompt is None else (prompt,))
    if not question.strip():
        raise click.UsageError("the prompt is empty")
    return question


def _check_together(mode: Mode, *, interactive: bool, session_file: Path | None, as_json: bool) -> None:
    if mode != "chat" and session_file is not None:
        raise click.UsageError("--session-file keeps a conversation: it goes with --mode chat")
    if interactive and mode == "fim":
        raise click.UsageError("fill-in-the-middle is asked once; leave -i out")
    if interactive and as_json:
        raise click.UsageError("--json is for programs, -i for people: give one of them")
