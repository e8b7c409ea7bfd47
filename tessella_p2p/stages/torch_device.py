"""Where torch computes, and the name of the bits that it gives there."""

from __future__ import annotations

import hashlib
import os
import re
from functools import lru_cache

import numpy as np
import torch
from torch.nn import functional

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.base.limits import MAX_DRIFT_CLASS_CHARS
from tessella_p2p.model.gguf import GgmlType
from tessella_p2p.model.recipe import Recipe
from tessella_p2p.stages.quantize import quantize_q4_0
from tessella_p2p.stages.torch_attention import attend
from tessella_p2p.stages.torch_linear import StoredMatrix, build_linear
from tessella_p2p.stages.torch_weights import TORCH_DTYPES

_PROBE_CHARS = 8


def torch_device(recipe: Recipe, name: str) -> torch.device:
    """The device ``name``: ``cpu``, ``cuda``, ``cuda:1``, ``mps``, or ``auto`` for the best that is there and can compute ``recipe``.

    Raises:
        ConfigurationError: there is no such device.
        NotCertified: the recipe is not computed on it.
    """
    recipe.check_device(name)
    if name == "auto":
        name = "cpu" if recipe.is_cpu_only else _best()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f"{name!r} is no device; cpu, cuda, cuda:N, mps and auto are") from error
    is_there = {
        "cpu": True,
        "cuda": torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not is_there.get(device.type, False):
        raise ConfigurationError(f"torch {torch.__version__} finds no device {name!r} on this machine")
    return device


def _best() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def prepare(device: torch.device) -> None:
    """Make products add in full float32, and kernels repeat themselves. Process-wide, as torch's settings are."""
    torch.set_float32_matmul_precision("highest")
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.use_deterministic_algorithms(True)


@lru_cache(maxsize=32)
def drift_class(recipe: Recipe, device: str = "cpu") -> str:
    """The class of ``recipe`` on ``device``: torch's version, the kernels that it chooses, and what they make of a probe.

    ``2.13.0+cpu-avx2-1f0c8a27``, ``2.13.0+cu128-cuda-sm90x132-…`` (compute capability and multiprocessors), ``2.13.0-mps-…``. The probe
    tells machines apart that look alike: math libraries choose by vendor, too.

    Raises:
        ConfigurationError, NotCertified: see `torch_device`.
    """
    where = torch_device(recipe, device)
    prepare(where)
    if where.type == "cpu":
        kernels = torch.backends.cpu.get_cpu_capability()
    elif where.type == "cuda":
        properties = torch.cuda.get_device_properties(where)
        kernels = f"cuda-sm{properties.major}{properties.minor}x{properties.multi_processor_count}"
    else:
        kernels = where.type
    build = re.sub(r"[^a-z0-9.+_-]", "-", f"{torch.__version__}-{kernels}".lower())
    return f"{build[: MAX_DRIFT_CLASS_CHARS - _PROBE_CHARS - 1]}-{_probe(recipe, where)}"


@torch.inference_mode()
def _probe(recipe: Recipe, device: torch.device) -> str:
    """A digest of the bits that this machine gives for every kind of operation of a layer, on fixed numbers."""
    dtype = TORCH_DTYPES[recipe.activation]
    dense, x = _numbers(64, 1536), torch.from_numpy(_numbers(5, 1536)).to(device, dtype)
    matrices = (
        StoredMatrix("probe", GgmlType.Q4_0, quantize_q4_0(dense)),
        StoredMatrix("probe", GgmlType.F32, dense.view(np.uint8)),
    )
    products = [build_linear([matrix], recipe, device).apply(x) for matrix in matrices]
    normed = functional.rms_norm(x, (x.shape[-1],), torch.ones(x.shape[-1], device=device, dtype=dtype), 1e-5)
    q, k, v = (torch.from_numpy(_numbers(rows, 64))[None].to(device) for rows in (12, 256, 256))
    attended = attend(q, k, v, torch.zeros(1, 12, 256, device=device))
    digest = hashlib.sha256()
    for result in (*products, normed, functional.silu(x), attended):
        digest.update(result.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:_PROBE_CHARS]


def _numbers(rows: int, columns: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """[rows, columns] float32 in −1..1 that look random: the same on every machine."""
    counts = np.arange(1, rows * columns + 1, dtype=np.uint32) * np.uint32(2654435761)
    mixed = (counts ^ (counts >> np.uint32(15))) * np.uint32(2246822519)
    return ((mixed >> np.uint32(8)).astype(np.float32) / np.float32(1 << 23) - np.float32(1)).reshape(rows, columns)
