"""What doctor finds on the machine itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from tessella_p2p.base.ids import PeerId
from tessella_p2p.node.config import NodeConfig, load_config
from tessella_p2p.node.findings import Finding, has_problem, ok, problem, warning
from tessella_p2p.node.keystore import generate_key
from tessella_p2p.node.machine_checks import (
    check_disk,
    check_ipv6,
    check_key,
    check_memory,
    check_model,
    check_reachability,
)
from tessella_p2p.node.settings import Given

ORCHESTRATOR = PeerId("12D3KooWQQnKirL4V2nvfnvhJzicNpsznh9k1htRGcT177VpeD8M")


def config(folder: Path, **settings: Any) -> NodeConfig:
    given = {
        "orchestrator_url": f"/ip4/127.0.0.1/tcp/9090/p2p/{ORCHESTRATOR}",
        "keypair_path": str(folder / "node.key"),
        "data_dir": str(folder / "data"),
        "models_dir": str(folder / "models"),
        **settings,
    }
    return load_config(
        NodeConfig, flags={name: Given(value, name) for name, value in given.items()}, environ={}, file=None
    )


def test_a_key_that_is_not_there_yet_is_no_problem_and_is_not_made(tmp_path: Path) -> None:
    key, finding = check_key(tmp_path / "node.key")
    assert key is None
    assert finding.level == "warning"
    assert not list(tmp_path.iterdir())


def test_a_good_key_is_named_and_one_that_others_may_read_says_how_to_mend_it(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    made = generate_key(path)
    key, finding = check_key(path)
    assert key is not None
    assert finding.level == "ok"
    assert made.peer_id in finding.says
    path.chmod(0o644)
    key, finding = check_key(path)
    assert key is None
    assert finding.level == "problem"
    assert "chmod 600" in finding.says + finding.fix


def test_a_folder_that_does_not_exist_is_judged_by_the_one_it_will_be_made_in(tmp_path: Path) -> None:
    assert check_disk(tmp_path / "a" / "b").level in ("ok", "warning")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_a_problem(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert check_disk(tmp_path / "data").level == "problem"


def test_a_claim_beyond_the_machine_is_a_problem(tmp_path: Path) -> None:
    total_mb = psutil.virtual_memory().total // 2**20
    assert check_memory(config(tmp_path, vram_mb=str(total_mb + 1))).level == "problem"
    assert check_memory(config(tmp_path, vram_mb="256"), used_mb=256).level == "ok"


@pytest.mark.parametrize(
    ("settings", "level"),
    [
        ({"p2p_host": "127.0.0.1"}, "warning"),
        ({"public_ip": "203.0.113.9"}, "ok"),
        ({"public_ip": "192.168.1.9"}, "warning"),
        ({"public_ip": "fd00::9"}, "warning"),
        ({"p2p_host": "10.1.2.3"}, "warning"),
        ({"p2p_host": "9.9.9.9"}, "ok"),
    ],
)
def test_whether_others_can_dial_follows_from_the_addresses(
    tmp_path: Path, settings: dict[str, str], level: str
) -> None:
    assert check_reachability(config(tmp_path, **settings)).level == level


def test_nothing_is_said_against_ipv6_that_nobody_needs(tmp_path: Path) -> None:
    assert check_ipv6(config(tmp_path)).level == "ok"
    loopback = f"/ip6/::1/tcp/9090/p2p/{ORCHESTRATOR}"
    assert check_ipv6(config(tmp_path, bootstrap=loopback)).level == "ok"


def test_a_model_that_is_not_there_says_how_to_get_it(tmp_path: Path) -> None:
    (finding,) = check_model(config(tmp_path), 0)
    assert finding.level == "problem"
    assert "models pull" in finding.fix
    (finding,) = check_model(config(tmp_path, default_model="unheard-of"), 0)
    assert (finding.level, "models pull" in finding.fix) == ("problem", False)


def test_a_file_that_is_no_model_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(64))
    findings = check_model(config(tmp_path, default_model=str(path)), 0)
    assert [finding.level for finding in findings] == ["ok", "problem"]


def test_a_catalogue_model_with_other_bytes_is_a_problem(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "smollm2-135m-instruct.gguf").write_bytes(b"GGUF" + bytes(64))
    findings = check_model(config(tmp_path), 0)
    assert findings[0].level == "problem"
    assert "SHA-256" in findings[0].says


def test_warnings_alone_are_no_problem() -> None:
    assert not has_problem([ok("a", "b"), warning("a", "b", "c")])
    assert has_problem([ok("a", "b"), problem("a", "b", "c")])
    assert Finding("a", "ok", "b").fix == ""
