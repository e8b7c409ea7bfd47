"""One model's file and everything that is read from it: the shell that the other floors hold."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from tessella_p2p.base.errors import ArtifactError
from tessella_p2p.model.chat import encode_chat, parse_messages
from tessella_p2p.model.config import ModelConfig
from tessella_p2p.model.gguf import GgufFile
from tessella_p2p.model.grammar import GrammarCompiler
from tessella_p2p.model.grammar_trial import GrammarTrial
from tessella_p2p.model.manifest import Manifest, StageCosts, build_manifest, contract_hash, root, stage_costs
from tessella_p2p.model.template import ChatTemplate
from tessella_p2p.model.tokenizer import Tokenizer
from tessella_p2p.model.tool_calls import parse_tools

_MAX_MODEL_ID_CHARS = 128


class Artifact:
    """An open model file. A context manager; use `open` to make one.

    The manifest is hashed when it is first asked for (see `hash`); tokenizer and template need the header alone.

    Attributes:
        model_id: its name in records and HTTP.
        file: the mapped file, for engines.
        config: the shape of the model.
        tokenizer: text to ids and back.
    """

    def __init__(self, file: GgufFile, model_id: str) -> None:
        self.model_id = model_id
        self.file = file
        self._manifest: Manifest | None = None
        self.config = ModelConfig.from_gguf(file)
        self.tokenizer = Tokenizer.from_metadata(file.metadata, file.path.name)

    @classmethod
    def open(cls, path: Path, model_id: str | None = None) -> Self:
        """Map a GGUF file and read its header. Blocking: a few tenths of a second for a vocabulary of 50,000.

        Args:
            path: the file.
            model_id: its name; by default the file's, in lower case and without its suffix.

        Raises:
            ArtifactError: damaged, truncated or no file.
            NotCertified: an architecture, tokenizer or tensor type that no test certifies.
        """
        file = GgufFile.open(path)
        try:
            return cls(file, model_id or model_id_of(path))
        except BaseException:  # whatever it is, nobody else would close the file
            file.close()
            raise

    @property
    def path(self) -> Path:
        """Where the file is."""
        return self.file.path

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template.

        Raises:
            ArtifactError: there is none, or it cannot be used.
        """
        return ChatTemplate.from_metadata(self.file.metadata, self.path.name)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiles what answers have to follow; each grammar is tried in a process of its own first, and given so much CPU later."""
        return GrammarCompiler.of(self.tokenizer, GrammarTrial(), time.thread_time)

    @cached_property
    def costs(self) -> StageCosts:
        """What ranges of it weigh."""
        return stage_costs(self.config, self.file.tensors)

    @cached_property
    def contract_hash(self) -> bytes:
        """Hash over the tensors' names, shapes and types."""
        return contract_hash(self.file.tensors.values())

    def hash(self, progress: Callable[[int, int], None] | None = None) -> Manifest:
        """The manifest, hashed once. Blocking: about a second per GiB the first time; call it on a thread.

        Raises:
            ArtifactError: the file cannot be read, or changed since it was opened.
        """
        if self._manifest is None:
            self._manifest = build_manifest(self.path, self.file, progress)
        return self._manifest

    @property
    def manifest(self) -> Manifest:
        """The manifest; hashes the file unless `hash` did."""
        return self.hash()

    @cached_property
    def root(self) -> bytes:
        """The artifact's name, 32 bytes; hashes the file unless `hash` did."""
        return root(self.manifest)

    @property
    def shows_tools(self) -> bool:
        """Whether its chat template offers tools to the model, see `ChatTemplate.shows_tools`; False where there is none."""
        try:
            return self.template.shows_tools
        except ArtifactError:
            return False

    def encode_messages(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        now_ms: int,
        tools: Sequence[Mapping[str, object]] = (),
        max_ids: int | None = None,
    ) -> list[int]:
        """The token ids of an OpenAI request's ``messages`` and ``tools``, ready for the assistant's answer.

        Raises:
            InvalidRequest, PromptTooLong, ArtifactError: see `chat.parse_messages`, `tool_calls.parse_tools` and `chat.encode_chat`.
        """
        conversation, offered = parse_messages(messages), parse_tools(tools)
        return encode_chat(self.tokenizer, self.template, conversation, now_ms=now_ms, max_ids=max_ids, tools=offered)

    def close(self) -> None:
        """Let go of the file."""
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def model_id_of(path: Path) -> str:
    """The name of a model that has none but its file's: lower case, with only the characters that names may have."""
    return re.sub(r"[^\w.+-]+", "-", path.stem.lower(), flags=re.ASCII).strip("-.")[:_MAX_MODEL_ID_CHARS] or "model"
