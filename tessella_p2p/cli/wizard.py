"""The questions of a node's first start; the answers become its configuration file, and nothing is asked again.

What the command line answers is not asked, and goes into the file as well; what the environment answers is not asked either, and stays
there. Each answer is held against the settings' own rules.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import click
import psutil

from tessella_p2p.base.errors import ConfigurationError, NotAuthorized, TessellaError, TransportError
from tessella_p2p.base.limits import MIB, MIN_CLAIM_MB
from tessella_p2p.cli.models import pull_shown
from tessella_p2p.cli.terminal import printable
from tessella_p2p.model.recipe import RECIPES
from tessella_p2p.node.config import NodeConfig, load_config
from tessella_p2p.node.config_file import write_config
from tessella_p2p.node.keystore import load_or_generate_key
from tessella_p2p.node.served_models import NetworkModel
from tessella_p2p.node.settings import Given, variables_of
from tessella_p2p.weights.catalog import CATALOG
from tessella_p2p.weights.store import resolve

_CLAIM_STEP_MB = 256
_PORTS_TRIED = 16
_MAX_SHOWN_MODELS = 20
_HERE = "this answer"
"""Where an answer was given, in the words of an error."""
ASKED = (
    *("orchestrator_url", "default_model", "vram_mb", "models_dir", "keypair_path", "api_host"),
    *("api_keys", "api_port", "p2p_port"),
)
"""The settings that are asked for, in this order; ``api_keys`` only where others can reach the API."""

ReadModels = Callable[[NodeConfig], Sequence[NetworkModel]]
"""Asks the orchestrator of a configuration what it serves; raises a `TessellaError`."""


def is_due(flags: Mapping[str, Given], environ: Mapping[str, str]) -> bool:
    """Whether a node without a file has to ask: nothing says where its orchestrator is."""
    return "orchestrator_url" not in flags and not _in_environment("orchestrator_url", environ)


def default_claim_mb(available_bytes: int) -> int:
    """Half of the memory that is free, in whole steps, and never less than a claim may be."""
    steps = available_bytes // 2 // (_CLAIM_STEP_MB * MIB)
    return max(steps * _CLAIM_STEP_MB, MIN_CLAIM_MB)


def first_free_port(wanted: int, is_free: Callable[[int], bool]) -> int:
    """``wanted``, or the next port that is free; ``wanted`` where none near it is."""
    return next((port for port in range(wanted, wanted + _PORTS_TRIED) if is_free(port)), wanted)


@dataclass(slots=True)
class Answers:
    """What is known so far, by setting; each new answer is checked together with those before it.

    Attributes:
        environ: counts beside the answers, as it will when the node starts.
        given: the answers as they were typed.
    """

    environ: Mapping[str, str]
    given: dict[str, Given] = field(default_factory=dict)

    def needs(self, name: str) -> bool:
        """Whether nobody has answered this yet."""
        return name not in self.given and not _in_environment(name, self.environ)

    def add(self, name: str, value: object) -> NodeConfig:
        """Take an answer; the configuration that all of them make.

        Raises:
            ConfigurationError: it breaks a rule, which the error names; nothing was taken.
        """
        config = self._loaded({**self.given, name: Given(value, _HERE)})
        self.given[name] = Given(value, name)
        return config

    def config(self) -> NodeConfig:
        """The configuration.

        Raises:
            ConfigurationError: something is missing or wrong.
        """
        return self._loaded(self.given)

    def _loaded(self, given: Mapping[str, Given]) -> NodeConfig:
        """The configuration, as if keys were asked for where it has to say so and nobody has yet: that is asked later."""
        if "api_keys" not in given and self.needs("api_keys"):
            later = {**given, "api_keys": Given("required", "a later answer")}
            config = load_config(NodeConfig, flags=later, environ=self.environ)
            if config.is_open_to_others:
                return config
        return load_config(NodeConfig, flags=given, environ=self.environ)

    def to_write(self) -> dict[str, object]:
        """The answers as values, for the file; paths in full, since the node may start in another folder."""
        config = self.config()
        values = {name: getattr(config, name) for name in self.given}
        return {name: value.absolute() if isinstance(value, Path) else value for name, value in values.items()}


def run_wizard(path: Path, flags: Mapping[str, Given], environ: Mapping[str, str], read_models: ReadModels) -> None:
    """Ask, make the key, write the file.

    Args:
        path: of the file; it does not exist.
        flags: settings that were given on the command line.
        environ: the process environment.
        read_models: asks the orchestrator.

    Raises:
        ConfigurationError: the flags break a rule, or the key or the file cannot be written.
        KeyboardInterrupt: the user left; nothing was written.
    """
    answers = Answers(environ, {name: given for name, given in flags.items() if name in ASKED})
    try:
        _say(f"This node has no configuration yet; the answers go into {path}.")
        _say("Enter takes what stands in brackets. Ctrl-C leaves, and nothing is written.\n")
        _ask_all(answers, read_models)
        config = answers.config()
        _say("")
        if not click.confirm(f"Write {path} and start?", default=True, err=True):
            raise click.Abort
    except click.Abort:
        _say("\nnothing was written")
        raise KeyboardInterrupt from None
    key = load_or_generate_key(config.keypair_path)
    write_config(path, NodeConfig, answers.to_write(), "Written by the first start of `tessella-p2p daemon`.")
    _say(f"written: {path}")
    others = [given.place for name, given in flags.items() if name not in ASKED]
    if others:
        _say(f"for this start alone, and not in the file: {', '.join(others)}")
    _say(f"this node is {key.peer_id}; its key is {config.keypair_path}. A lost key is a lost identity: keep a copy.")
    if config.api_keys == "required":
        _say("clients need a key: make one with `tessella-p2p keys api add`")
    _say("")


def _ask_all(answers: Answers, read_models: ReadModels) -> None:
    models = _ask_orchestrator(answers, read_models)
    _ask_model(answers, models)
    if answers.needs("vram_mb"):
        free = psutil.virtual_memory().available
        _ask(answers, "vram_mb", f"Memory to claim, in MB ({free // MIB} are free)", default_claim_mb(free))
    if answers.needs("models_dir"):
        _ask(answers, "models_dir", "Folder of models", answers.config().models_dir)
    _offer_pull(answers.config())
    if answers.needs("keypair_path"):
        path = answers.config().keypair_path
        _ask(answers, "keypair_path", f"Key file{'' if path.exists() else ' (it will be made)'}", path)
    if answers.needs("api_host"):
        _say("The HTTP API: 127.0.0.1 is for programs on this machine, 0.0.0.0 for everybody who reaches it.")
        _ask(answers, "api_host", "Address of the HTTP API", NodeConfig.model_fields["api_host"].default)
    if answers.needs("api_keys") and answers.config().is_open_to_others:
        _say(
            "Others can reach it then. With `required` they need a key of yours; with `off` anybody may use this node."
        )
        _ask(answers, "api_keys", "Ask for API keys (required or off)", "required")
    for name, what in (("api_port", "Port of the HTTP API"), ("p2p_port", "Port for other nodes")):
        if answers.needs(name):
            _ask_port(answers, name, what)


def _ask_orchestrator(answers: Answers, read_models: ReadModels) -> Sequence[NetworkModel]:
    """Ask until an orchestrator answers, or one is to be kept that does not; the models that it serves."""
    while True:
        if answers.needs("orchestrator_url"):
            _say("The orchestrator's address, as its operator gives it: /ip4/HOST/tcp/PORT/p2p/PEER_ID")
            _ask(answers, "orchestrator_url", "Orchestrator")
        _say("  asking it what it serves…")
        try:
            models = read_models(answers.config())
        except NotAuthorized:
            _say(
                "  it is there, and its mesh is private: its operator has to allow this node's peer id, which is shown at the end"
            )
            return ()
        except TessellaError as error:
            what = "cannot be reached" if isinstance(error, TransportError) else "does not answer as it should"
            _say(f"  it {what}: {printable(str(error))}")
            if click.confirm("  Keep this address all the same?", default=False, err=True):
                return ()
            answers.given.pop("orchestrator_url", None)
            continue
        for number, model in enumerate(models[:_MAX_SHOWN_MODELS], 1):
            workers = f"{model.num_workers} worker{'s' * (model.num_workers != 1)}"
            _say(f"  {number}. {printable(model.model_id)} ({workers})")
        if not models:
            _say("  it serves nothing yet")
        return models


def _ask_model(answers: Answers, models: Sequence[NetworkModel]) -> None:
    if answers.needs("default_model"):
        default = models[0].model_id if models else answers.config().default_model
        names = [model.model_id for model in models]
        _ask(answers, "default_model", "Model, by name or number" if models else "Model", default, names)
    chosen = answers.config().default_model
    recipe = next((model.recipe for model in models if model.model_id == chosen), None)
    config = answers.config()
    if recipe in RECIPES and answers.needs("recipe") and answers.needs("quantization") and recipe != config.recipe:
        answers.add("recipe", recipe)
        _say(f"  its workers compute in {recipe}, so this node will too")


def _offer_pull(config: NodeConfig) -> None:
    """A model that can be had is brought here now, if that is wanted; nothing else depends on it."""
    try:
        resolve(config.default_model, config.models_dir)
    except ConfigurationError as error:
        known = CATALOG.get(config.default_model)
        if known is None:
            _say(f"  note: {printable(str(error))}")
            return
        size = f"{known.source.size_bytes / MIB:.0f} MiB"
        if not click.confirm(f"  {config.default_model} is not there; pull it now ({size})?", default=True, err=True):
            return
        try:
            pull_shown(config.default_model, config.models_dir)
        except TessellaError as failure:
            _say(f"  it was not pulled: {printable(str(failure))}")
        else:
            _say("  pulled and verified")


def _ask_port(answers: Answers, name: str, what: str) -> None:
    standard = NodeConfig.model_fields[name].default
    others = {getattr(answers.config(), other) for other in ("api_port", "p2p_port") if other in answers.given}
    free = first_free_port(standard, lambda port: port not in others and is_free(port))
    taken = "" if free == standard else f" ({standard} is taken)"
    while True:
        _ask(answers, name, f"{what}{taken}", free)
        port = getattr(answers.config(), name)
        if not port or port not in others:
            break
        answers.given.pop(name)
        _say(f"  {port} is the other port of this node")
    if port != free and not is_free(port):
        _say(f"  note: another program listens on {port} now; the node does not start beside it")


def _ask(answers: Answers, name: str, text: str, default: object | None = None, choices: Sequence[str] = ()) -> None:
    """Ask until an answer keeps the rules; a number means one of ``choices``."""
    while True:
        value = None if default is None else str(default)
        suffix = ": " if value is None else f" [{printable(value)}]: "  # it may be a name of the network
        typed = str(click.prompt(text, value, prompt_suffix=suffix, show_default=False, err=True)).strip()
        if choices and typed.isascii() and typed.isdecimal() and typed not in choices:
            number = int(typed[:9])
            if not 1 <= number <= len(choices):
                _say(f"  there is no model {number} in the list")
                continue
            typed = choices[number - 1]
        try:
            answers.add(name, typed)
        except ConfigurationError as error:
            # what was typed stands above it
            _say(f"  {printable(str(error).partition(f'{_HERE} = ')[2].partition(': ')[2] or str(error))}")
        else:
            return


def is_free(port: int) -> bool:
    """Whether nobody on this machine listens on a port."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _in_environment(name: str, environ: Mapping[str, str]) -> bool:
    return any(environ.get(variable) for variable in variables_of(name, NodeConfig.model_fields[name]))


def _say(text: str) -> None:
    click.echo(text, err=True)
