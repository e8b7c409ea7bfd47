"""The key file: made once, never replaced, refused when anything about it is wrong."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tessella_p2p.base.errors import KeyFileError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.node.keystore import KEY_FILE_BYTES, generate_key, held_key, load_key, load_or_generate_key
from tessella_p2p.wire.keys import NodeKey


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tessella" / "node.key"


@pytest.fixture(autouse=True)
def _private_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locks").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "locks"))


def test_a_made_key_is_loaded_again_and_belongs_to_its_owner_alone(path: Path) -> None:
    key = generate_key(path)
    assert load_key(path).peer_id == key.peer_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.read_bytes() == key.to_protobuf()
    assert [child.name for child in path.parent.iterdir()] == ["node.key"]


def test_the_mode_does_not_depend_on_the_umask(path: Path) -> None:
    before = os.umask(0o777)
    try:
        path.parent.mkdir(mode=0o700)
        path.parent.chmod(0o700)
        generate_key(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_key_is_never_replaced(path: Path) -> None:
    key = generate_key(path)
    with pytest.raises(KeyFileError, match="never replaced"):
        generate_key(path)
    assert load_key(path).peer_id == key.peer_id


@pytest.mark.parametrize("content", [b"", b"garbage", bytes(68)])
def test_a_damaged_file_is_neither_used_nor_replaced(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_bytes(content)
    path.chmod(0o600)
    for attempt in (load_key, load_or_generate_key):
        with pytest.raises(KeyFileError, match=r"node.key is damaged: .*backup"):
            attempt(path)
    with pytest.raises(KeyFileError, match="never replaced"):
        generate_key(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("spoil", "wanted"),
    [
        (lambda data: data[:-1], f"holds {KEY_FILE_BYTES - 1} bytes"),
        (lambda data: data + b"\n", "holds over 68 bytes"),
        (lambda data: bytes([data[0] ^ 1]) + data[1:], "no Ed25519 private key"),
        (lambda data: data[:10] + bytes([data[10] ^ 1]) + data[11:], "does not belong to its secret half"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "does not belong to its secret half"),
    ],
)
def test_a_key_file_that_lost_a_bit_is_refused(path: Path, spoil: object, wanted: str) -> None:
    generate_key(path)
    path.write_bytes(spoil(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(KeyFileError, match=wanted):
        load_key(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666, 0o620, 0o610])
def test_a_key_that_others_may_touch_is_refused_with_the_command_that_mends_it(path: Path, mode: int) -> None:
    generate_key(path)
    path.chmod(mode)
    with pytest.raises(KeyFileError, match=rf"\(mode 0{mode:o}\): `chmod 600 {path}`"):
        load_key(path)


def test_a_folder_that_others_may_write_to_is_refused(path: Path) -> None:
    generate_key(path)
    path.parent.chmod(0o777)
    with pytest.raises(KeyFileError, match=rf"`chmod go-w {path.parent}`"):
        load_key(path)
    path.parent.chmod(0o1777)  # as /tmp: nobody can put another file in its place
    load_key(path)


def test_no_key_is_made_in_a_folder_that_others_may_write_to(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o775)
    for make in (generate_key, load_or_generate_key):
        with pytest.raises(KeyFileError, match=rf"`chmod go-w {path.parent}`"):
            make(path)
    assert list(path.parent.iterdir()) == []
    path.parent.chmod(0o1777)
    assert generate_key(path).peer_id == load_key(path).peer_id


def test_a_link_to_a_key_is_refused(path: Path, tmp_path: Path) -> None:
    generate_key(path)
    link = tmp_path / "link.key"
    link.symlink_to(path)
    with pytest.raises(KeyFileError, match="symbolic link"):
        load_key(link)


def test_a_dangling_link_is_not_followed_to_make_a_key(tmp_path: Path) -> None:
    link = tmp_path / "link.key"
    link.symlink_to(tmp_path / "elsewhere.key")
    with pytest.raises(KeyFileError):
        load_or_generate_key(link)
    assert not (tmp_path / "elsewhere.key").exists()


def test_a_folder_or_a_pipe_in_the_place_of_a_key_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.key"
    os.mkfifo(pipe, 0o600)
    for place in (tmp_path, pipe):
        with pytest.raises(KeyFileError, match="no regular file"):
            load_key(place)


def test_somebody_elses_key_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate_key(path)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)  # another user, whom a test cannot become
    with pytest.raises(KeyFileError, match=f"belongs to user {owner}"):
        load_key(path)


def test_a_missing_key_is_refused_with_the_command_that_makes_one(path: Path) -> None:
    with pytest.raises(KeyFileError, match=f"`tessella-p2p keys generate --keypair-path {path}`"):
        load_key(path)


def test_a_place_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KeyFileError, match="no key file can be made there"):
        generate_key(tmp_path / "file" / "node.key")


def test_many_that_make_a_key_at_once_agree_on_one(path: Path) -> None:
    start = threading.Barrier(8)
    made: list[PeerId] = []

    def make() -> None:
        start.wait()
        made.append(load_or_generate_key(path).peer_id)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    assert set(made) == {load_key(path).peer_id}
    assert [child.name for child in path.parent.iterdir()] == ["node.key"]


def test_a_held_key_is_refused_to_the_next_and_free_afterwards(path: Path) -> None:
    with held_key(path) as key, pytest.raises(KeyFileError, match=f"is {key.peer_id} already"), held_key(path):
        pytest.fail("two processes had one identity")
    with held_key(path) as again:
        assert again.peer_id == key.peer_id


def test_a_copy_of_a_held_key_is_refused(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.key"
    with held_key(path) as key:
        copy.write_bytes(key.to_protobuf())
        copy.chmod(0o600)
        with pytest.raises(KeyFileError, match="another process of this machine"), held_key(copy):
            pytest.fail("two processes had one identity")


def test_other_keys_are_held_beside_it(path: Path, tmp_path: Path) -> None:
    with held_key(path) as one, held_key(tmp_path / "other.key") as other:
        assert one.peer_id != other.peer_id


def test_a_process_that_is_killed_lets_go_of_its_key(path: Path, tmp_path: Path) -> None:
    script = (
        "import sys, tempfile; from pathlib import Path\n"
        "from tessella_p2p.node.keystore import held_key\n"
        f"tempfile.tempdir = {str(tmp_path / 'locks')!r}\n"
        "with held_key(Path(sys.argv[1])) as key:\n"
        "    print(key.peer_id, flush=True); sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        peer_id = holder.stdout.readline().strip()
        with pytest.raises(KeyFileError, match=peer_id), held_key(path):
            pytest.fail("two processes had one identity")
        holder.send_signal(signal.SIGKILL)
    with held_key(path) as key:
        assert key.peer_id == peer_id


def test_a_lock_folder_that_is_not_ours_is_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "locks" / f"tessella-{os.geteuid()}").write_text("in the way")
    with pytest.raises(KeyFileError, match="no lock can stand there"), held_key(path):
        pytest.fail("held without a lock")


def test_a_key_of_libp2ps_own_making_is_read(path: Path) -> None:
    seed = bytes(range(32))
    path.parent.mkdir(mode=0o700)
    path.write_bytes(bytes.fromhex("08011240") + seed + NodeKey(seed).public_key)
    path.chmod(0o600)
    assert load_key(path).peer_id == NodeKey(seed).peer_id
