"""What a model is made of, read from the artifact itself, never from flags; what no test certifies is refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tessella_p2p.base.errors import ArtifactError, NotCertified
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.base.limits import MAX_MODEL_LAYERS, MAX_MODEL_WIDTH, MAX_POSITIONS, MAX_VOCABULARY
from tessella_p2p.model.gguf import GgmlType, GgufFile, TensorInfo

CERTIFIED_ARCHITECTURES: Final = ("llama",)
CERTIFIED_KINDS: Final = frozenset(GgmlType)
"""Types of tensors that a test compares with gguf-py."""
EMBEDDING: Final = "token_embd.weight"
OUTPUT_NORM: Final = "output_norm.weight"
OUTPUT: Final = "output.weight"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one model.

    Attributes:
        architecture: GGUF's ``general.architecture``.
        layers: transformer blocks.
        hidden: width of the residual stream (``d_model``).
        heads: query heads.
        kv_heads: key and value heads; ``heads`` is a multiple of it.
        head_dim: width of one head.
        ffn: width of the gated feed-forward.
        vocabulary: rows of the embedding.
        rope_theta: base of the rotary frequencies.
        rms_eps: epsilon of the RMS norms.
        context_length: positions that the model was trained for.
        tied_embedding: whether the head's matrix is the embedding.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    rope_theta: float
    rms_eps: float
    context_length: int
    tied_embedding: bool

    @property
    def all_layers(self) -> LayerRange:
        """The range that is the whole model."""
        return LayerRange(0, self.layers)

    def is_head(self, layers: LayerRange) -> bool:
        """Whether ``layers`` takes token ids, so that it owns the embedding."""
        return layers.start == 0

    def is_tail(self, layers: LayerRange) -> bool:
        """Whether ``layers`` ends in logits, so that it owns the output norm and the head's matrix."""
        return layers.end == self.layers

    def layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """The tensors of one layer and their row-major shapes."""
        q_rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm": (self.hidden,),
            "attn_q": (q_rows, self.hidden),
            "attn_k": (kv_rows, self.hidden),
            "attn_v": (kv_rows, self.hidden),
            "attn_output": (self.hidden, q_rows),
            "ffn_norm": (self.hidden,),
            "ffn_gate": (self.ffn, self.hidden),
            "ffn_up": (self.ffn, self.hidden),
            "ffn_down": (self.hidden, self.ffn),
        }
        return {f"blk.{layer}.{name}.weight": shape for name, shape in shapes.items()}

    def tensor_shapes(self, layers: LayerRange) -> dict[str, tuple[int, ...]]:
        """The tensors that a stage of ``layers`` needs, and no others.

        With a tied embedding the head and the tail both need the embedding: the one place where two ranges share a tensor.

        Raises:
            ArtifactError: ``layers`` is not a range of this model.
        """
        if layers.end > self.layers:
            raise ArtifactError(f"layers {layers} are not in a model of {self.layers} layers")
        shapes: dict[str, tuple[int, ...]] = {}
        if self.is_head(layers):
            shapes[EMBEDDING] = (self.vocabulary, self.hidden)
        for layer in layers:
            shapes.update(self.layer_shapes(layer))
        if self.is_tail(layers):
            shapes[OUTPUT_NORM] = (self.hidden,)
            shapes[self.output_name] = (self.vocabulary, self.hidden)
        return shapes

    @property
    def output_name(self) -> str:
        """The tensor that is the head's matrix."""
        return EMBEDDING if self.tied_embedding else OUTPUT

    @classmethod
    def from_gguf(cls, file: GgufFile) -> ModelConfig:
        """The configuration in the header of ``file``; see `from_header`."""
        return cls.from_header(file.metadata, file.tensors, file.path.name)

    @classmethod
    def from_header(cls, metadata: Mapping[str, object], tensors: Mapping[str, TensorInfo], source: str) -> ModelConfig:
        """The configuration that a GGUF header describes, checked against its tensor table.

        Args:
            metadata: the header's key/value pairs.
            tensors: the header's tensor table.
            source: the file's name, for messages.

        Raises:
            NotCertified: an architecture, a rotary scaling, a tensor or a tensor type that no test certifies.
            ArtifactError: metadata that are missing, out of bounds or not what the tensors say.
        """
        header = _Header(metadata, source)
        architecture = header.text("general.architecture")
        if architecture not in CERTIFIED_ARCHITECTURES:
            raise NotCertified(
                f"{source}: architecture {architecture!r} is not certified; certified: {', '.join(CERTIFIED_ARCHITECTURES)}"
            )
        _refuse_variants(header, architecture)
        embedding = tensors.get(EMBEDDING)
        if embedding is None or len(embedding.shape) != 2:
            raise ArtifactError(f"{source}: there is no matrix {EMBEDDING!r}")
        hidden = header.number(f"{architecture}.embedding_length", MAX_MODEL_WIDTH)
        heads = header.number(f"{architecture}.attention.head_count", hidden)
        config = cls(
            architecture=architecture,
            layers=header.number(f"{architecture}.block_count", MAX_MODEL_LAYERS),
            hidden=hidden,
            heads=heads,
            kv_heads=header.number(f"{architecture}.attention.head_count_kv", heads, heads),
            head_dim=header.number(f"{architecture}.attention.key_length", MAX_MODEL_WIDTH, hidden // heads),
            ffn=header.number(f"{architecture}.feed_forward_length", MAX_MODEL_WIDTH),
            vocabulary=embedding.shape[0],
            rope_theta=header.real(f"{architecture}.rope.freq_base", 10_000.0),
            rms_eps=header.real(f"{architecture}.attention.layer_norm_rms_epsilon"),
            context_length=header.number(f"{architecture}.context_length", MAX_POSITIONS),
            tied_embedding=OUTPUT not in tensors,
        )
        _check_consistency(config, header)
        _check_tensors(config, tensors, source)
        return config


class _Header:
    """Typed, bounded access to metadata."""

    __slots__ = ("metadata", "source")

    def __init__(self, metadata: Mapping[str, object], source: str) -> None:
        self.metadata = metadata
        self.source = source

    def fail(self, key: str, what: str) -> ArtifactError:
        return ArtifactError(f"{self.source}: metadata {key!r} {what}")

    def text(self, key: str) -> str:
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise self.fail(key, "is missing or no string")
        return value

    def number(self, key: str, largest: int, default: int | None = None) -> int:
        value = self.metadata.get(key, default)
        if isinstance(value, tuple):
            raise NotCertified(f"{self.source}: metadata {key!r} differs from layer to layer, which no test certifies")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, "is missing or no integer")
        if not 1 <= value <= largest:
            raise self.fail(key, f"is {value}; 1 to {largest} are accepted")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.metadata.get(key, default)
        if not isinstance(value, float) or not 0.0 < value < 1e12:
            raise self.fail(key, "is missing or no positive number")
        return value


def _refuse_variants(header: _Header, architecture: str) -> None:
    """Refuse what changes the arithmetic and has no test: rotary scaling, experts, sliding windows and their like."""
    neutral: tuple[tuple[str, tuple[object, ...]], ...] = (
        ("rope.scaling.type", ("none",)),
        ("rope.scaling.factor", (1.0,)),
        ("rope.scale_linear", (1.0,)),
        ("expert_count", (0,)),
        ("attention.sliding_window", (0,)),
        ("attention.causal", (True,)),
        ("attention.scale", ()),
        ("attention.clamp_kqv", (0.0,)),
        ("logit_scale", (1.0, 0.0)),
        ("residual_scale", (1.0, 0.0)),
        ("embedding_scale", (1.0, 0.0)),
        ("use_parallel_residual", (False,)),
    )
    for name, accepted in neutral:
        key = f"{architecture}.{name}"
        if key in header.metadata and header.metadata[key] not in accepted:
            raise NotCertified(f"{header.source}: {key} = {header.metadata[key]!r} is not certified")


def _check_consistency(config: ModelConfig, header: _Header) -> None:
    prefix = config.architecture
    if not 1 <= config.vocabulary <= MAX_VOCABULARY:
        raise ArtifactError(f"{header.source}: a vocabulary of {config.vocabulary}; 1 to {MAX_VOCABULARY} are accepted")
    if config.heads % config.kv_heads:
        raise ArtifactError(f"{header.source}: {config.heads} heads do not share {config.kv_heads} KV heads evenly")
    if config.head_dim % 2:
        raise ArtifactError(f"{header.source}: a head of {config.head_dim} elements cannot be rotated in halves")
    for name in ("rope.dimension_count", "attention.value_length"):
        value = header.number(f"{prefix}.{name}", MAX_MODEL_WIDTH, config.head_dim)
        if value != config.head_dim:
            raise NotCertified(
                f"{header.source}: {prefix}.{name} = {value} with heads of {config.head_dim} is not certified"
            )


def _expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield EMBEDDING, (config.vocabulary, config.hidden)
    yield from config.tensor_shapes(config.all_layers).items()


def _check_tensors(config: ModelConfig, tensors: Mapping[str, TensorInfo], source: str) -> None:
    expected = dict(_expected_shapes(config))
    for name, shape in expected.items():
        info = tensors.get(name)
        if info is None:
            raise ArtifactError(f"{source}: there is no tensor {name!r}")
        if info.shape != shape:
            raise ArtifactError(f"{source}: tensor {name!r} has shape {info.shape}; {shape} is needed")
        if info.kind not in CERTIFIED_KINDS:
            raise NotCertified(f"{source}: tensor {name!r} is {info.kind.name}, which no test certifies")
    for name in tensors:
        if name not in expected:
            raise NotCertified(f"{source}: no test certifies a {config.architecture} model with a tensor {name!r}")
