"""Flag, environment and file mean the same; whatever is wrong is refused where it was given."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import given
from hypothesis import strategies as st

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.model.recipe import RECIPES
from tessella_p2p.node.config import NOT_SUPPORTED, BootstrapConfig, NodeConfig, OrchestratorConfig, load_config
from tessella_p2p.node.settings import Given, spelling_of, variables_of
from tessella_p2p.wire.keys import NodeKey

PEER = NodeKey(bytes(32)).peer_id
URL = f"tcp://{PEER}@tracker.example.org:9090"

MANUAL = f"""
orchestrator_url = "{URL}"
keypair_path     = "/home/operator/.config/tessella/node.key"
default_model    = "Qwen/Qwen2.5-0.5B-Instruct"

[worker]
vram_mb    = 2048
models_dir = "./models"
api_host   = "0.0.0.0"
api_port   = 8080
p2p_host   = "0.0.0.0"
p2p_port   = 9080
device     = "cpu"

[gpu]
oom_streak         = 3
streak_window_secs = 30
"""


def node_config(file: Path | None = None, flags: Mapping[str, object] | None = None, **environ: str) -> NodeConfig:
    given_flags = {name: Given(value, f"--{name}") for name, value in (flags or {}).items()}
    return load_config(NodeConfig, flags=given_flags, environ={"ORCHESTRATOR_URL": URL, **environ}, file=file)


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "node.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_the_manuals_file_is_read_once_it_says_who_may_ask(toml: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"api_keys = 'required', and make keys with .*, or api_keys = 'off'"):
        load_config(NodeConfig, flags={}, environ={}, file=toml(MANUAL))
    asking = MANUAL.replace('"0.0.0.0"\napi_port', '"0.0.0.0"\napi_keys   = "required"\napi_port')
    config = load_config(NodeConfig, flags={}, environ={}, file=toml(asking))
    assert config.api_keys == "required"
    assert config.orchestrator.multiaddr == f"/dns/tracker.example.org/tcp/9090/p2p/{PEER}"
    assert config.keypair_path == Path("/home/operator/.config/tessella/node.key")
    assert (config.vram_mb, config.api_host, config.api_port, config.p2p_port) == (2048, "0.0.0.0", 8080, 9080)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1"])
def test_on_loopback_nobody_has_to_say_who_may_ask(host: str) -> None:
    assert node_config(flags={"api_host": host}).api_keys is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "2001:db8::1"])
@pytest.mark.parametrize("keys", ["off", "required"])
def test_on_a_wider_host_it_has_to_be_said_who_may_ask(host: str, keys: str) -> None:
    with pytest.raises(ConfigurationError, match="lets other machines use this node"):
        node_config(flags={"api_host": host})
    assert node_config(flags={"api_host": host}, TESSELLA_API_KEYS=keys).api_keys == keys


@pytest.mark.parametrize("keys", ["off", "required"])
def test_an_api_that_others_are_told_of_has_to_say_who_may_ask(keys: str) -> None:
    public = {"public_api_url": "https://node.example"}
    with pytest.raises(ConfigurationError, match=r"the public address https://node\.example lets other machines use"):
        node_config(flags=public)
    assert node_config(flags=public, TESSELLA_API_KEYS=keys).api_keys == keys


@pytest.mark.parametrize("origin", ["https://chat.example.org", "http://localhost:3000", "http://[::1]:3000", "*"])
def test_an_origin_is_written_as_browsers_write_it(origin: str) -> None:
    assert node_config(TESSELLA_CORS_ORIGINS=f"{origin},https://other.example").cors_origins == (
        origin,
        "https://other.example",
    )


@pytest.mark.parametrize(
    "origin",
    [
        *("chat.example.org", "https://", "https://chat.example.org/", "https://Chat.example.org", "null", "file:///x"),
        *(
            "https://chat.example.org:443",
            "http://a.example:80",
            "https://user@a.example",
            "https://a.example?x",
            "https://a b",
        ),
        *("https://ä.example", "https://*.example"),
    ],
)
def test_what_no_browser_sends_as_an_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigurationError, match=r"cors_origins|TESSELLA_CORS_ORIGINS"):
        node_config(TESSELLA_CORS_ORIGINS=origin)


def test_defaults_are_the_manuals_and_the_api_is_local() -> None:
    config = node_config()
    assert (config.api_host, config.api_port, config.p2p_host, config.p2p_port) == ("127.0.0.1", 8080, "0.0.0.0", 9080)
    assert config.device == "cpu"
    assert (config.p2p_inference_timeout_secs, config.wal_checkpoint_interval_secs) == (10.0, 5.0)
    assert config.keypair_path == Path("~/.config/tessella/node.key").expanduser()


def test_each_role_has_its_own_key_and_folder() -> None:
    roles = [
        node_config(),
        load_config(OrchestratorConfig, flags={}, environ={}),
        load_config(BootstrapConfig, flags={}, environ={}),
    ]
    assert [config.keypair_path.name for config in roles] == ["node.key", "orchestrator.key", "bootstrap.key"]
    assert [getattr(config, "data_dir", Path()).name for config in roles] == ["node", "orchestrator", ""]


# ---- flag > environment > file > default ----

_addresses = st.builds(
    "/ip4/203.0.113.{}/tcp/{}/p2p/{}".format, st.integers(1, 254), st.integers(1, 65_535), st.just(PEER)
)
_words = st.text("abcdefghijklmnop-./_0123456789", min_size=1, max_size=20)
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "vram_mb": st.integers(256, 1 << 20),
    "api_port": st.integers(0, 65_535),
    "recipe": st.sampled_from(sorted(RECIPES)),
    "layers": st.tuples(st.integers(0, 40), st.integers(41, 80)).map(list),
    "threads": st.integers(1, 64),
    "max_input_tokens": st.integers(1, 1 << 20),
    "p2p_inference_timeout_secs": st.floats(0.001, 3600),
    "kademlia_enabled": st.booleans(),
    "bootstrap": st.lists(_addresses, max_size=4),
    "default_model": _words,
    "models_dir": _words,
    "log_level": st.sampled_from(["debug", "info", "warning", "error"]),
    "public_ip": st.ip_addresses().map(str),
}


def _as_text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


@given(st.data())
def test_a_flag_wins_over_the_environment_that_over_the_file_that_over_the_default(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(_VALUES)))
    values = _VALUES[name]
    flag, variable, key = data.draw(st.tuples(*(st.none() | values for _ in range(3))))
    field = NodeConfig.model_fields[name]
    section = data.draw(st.sampled_from(spelling_of(field).sections))
    file = None
    if key is not None:
        file = tmp_path_factory.getbasetemp() / "precedence.toml"
        file.write_text(tomlkit.dumps({section: {name: key}} if section else {name: key}), encoding="utf-8")
    environ = {}
    if variable not in (None, []):
        environ = {data.draw(st.sampled_from(variables_of(name, field))): _as_text(variable)}
    flags = {} if flag is None else {name: _as_text(flag)}

    config = node_config(file, flags, **environ)

    winner = flag if flag is not None else variable if environ else key
    alone = node_config(None, {} if winner is None else {name: winner})
    assert getattr(config, name) == getattr(alone, name)


def test_an_empty_variable_counts_as_unset() -> None:
    assert node_config(TESSELLA_VRAM_MB="").vram_mb == 2048


def test_a_variable_of_another_role_is_left_alone() -> None:
    load_config(BootstrapConfig, flags={}, environ={"TESSELLA_VRAM_MB": "1", "ORCHESTRATOR_URL": "nonsense"})


def test_both_spellings_of_a_variable_may_agree_and_not_differ() -> None:
    assert node_config(TESSELLA_ORCHESTRATOR_URL=URL).orchestrator_url == URL
    with pytest.raises(ConfigurationError, match="are set and differ"):
        node_config(TESSELLA_ORCHESTRATOR_URL=f"tcp://{PEER}@elsewhere:1")


def test_layers_come_as_a_list_or_as_text(toml: Any) -> None:
    wanted = LayerRange(0, 10)
    assert node_config(toml("[worker]\nlayers = [0, 10]")).layers == wanted
    assert node_config(TESSELLA_LAYERS="0,10").layers == wanted
    assert node_config(TESSELLA_LAYERS="[0, 10]").layers == wanted


def test_the_config_folder_moves_the_default_key() -> None:
    assert node_config(TESSELLA_CONFIG_DIR="/srv/key").keypair_path == Path("/srv/key/node.key")


def test_a_token_is_never_shown() -> None:
    config = node_config(HF_TOKEN="hf_secret")
    assert "hf_secret" not in repr(config)
    assert "hf_secret" not in str(config.model_dump())


# ---- refusals ----


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("vram_mb = 2048", r"node.toml: vram_mb: this key belongs to \[worker\] vram_mb"),
        ("[worker]\nvram_md = 2048", r"node.toml: \[worker\] vram_md: unknown key; did you mean vram_mb\?"),
        ("[wroker]\nvram_mb = 2048", r"node.toml: unknown section \[wroker\]; did you mean \[worker\]\?"),
        ("worker = 3", r"node.toml: worker: unknown key"),
        ("[[worker]]\nvram_mb = 2048", r"node.toml: worker: unknown key"),
        ("[worker]\nvram_mb = 255", r"node.toml: \[worker\] vram_mb = 255: .*greater than or equal to 256"),
        ("[worker]\nvram_mb = true", r"node.toml: \[worker\] vram_mb = True: a number is expected"),
        ('[worker]\nvram_mb = "much"', r"node.toml: \[worker\] vram_mb = 'much': .*valid integer"),
        ("[worker]\nvram_mb = 2048.5", r"vram_mb = 2048.5: .*integer"),
        ("[worker]\nlayers = [10, 10]", r"layers = \[10, 10\]: layers \[10, 10\) are no range"),
        ("[worker]\nlayers = [1.5, 3]", r"layers = \[1.5, 3\]: two layer numbers"),
        ('[worker]\napi_host = "localhost.example"', r"api_host = .*does not appear to be an IPv4 or IPv6 address"),
        ("[worker]\napi_port = 70000", r"api_port = 70000: .*less than or equal to 65535"),
        ('[worker]\nrecipe = "int5"', r"recipe = 'int5': .*'f32', 'q8_0', .* or 'torch-int4'"),
        ("p2p_inference_timeout_secs = inf", r"p2p_inference_timeout_secs = inf: .*"),
        ("p2p_inference_timeout_secs = 0", r"p2p_inference_timeout_secs = 0: .*greater than 0"),
        ('bootstrap = ["/ip4/203.0.113.7/tcp/9070"]', r"bootstrap = .* has no /p2p/PEER_ID"),
        ('hf_token = "hf_x"', r"node.toml: hf_token: no key of a file; give it by HF_TOKEN"),
        ("exit_with_stdin = true", r"node.toml: exit_with_stdin: no key of a file; give it by --exit-with-stdin"),
        ("public_p2p_port = 1", r"public_p2p_port needs public_ip"),
        (
            "canary_mode = 'off'\n[worker]\ncanary_mode = 'off'",
            r"canary_mode: given before as .*node.toml: canary_mode",
        ),
        ("a = [", r"node.toml: no TOML: "),
        ("\ud800", r"node.toml: no TOML: "),
        ("x = " + "[" * 100_000, r"node.toml: no TOML: "),
        ("#" * (1 << 20) + "\n", r"node.toml: a configuration of over"),
    ],
)
def test_a_wrong_file_is_refused_by_name_and_rule(tmp_path: Path, text: str, wanted: str) -> None:
    path = tmp_path / "node.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigurationError, match=wanted):
        node_config(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"gone.toml: the configuration file cannot be read: No such file"):
        node_config(tmp_path / "gone.toml")


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({"TESSELLA_VRAMMB": "1"}, r"TESSELLA_VRAMMB: unknown environment variable; did you mean TESSELLA_VRAM_MB\?"),
        ({"TESSELLA_XYZZY": "1"}, r"TESSELLA_XYZZY: unknown environment variable"),
        ({"TESSELLA_VRAM_MB": "12"}, r"TESSELLA_VRAM_MB = '12': .*greater than or equal to 256"),
        ({"TESSELLA_KADEMLIA_ENABLED": "perhaps"}, r"TESSELLA_KADEMLIA_ENABLED = 'perhaps': .*boolean"),
        ({"TESSELLA_MODELS_DIR": "a\0b"}, r"TESSELLA_MODELS_DIR = .*a path is expected"),
        ({"ORCHESTRATOR_URL": "https://tracker1.musivum.dev"}, r"ORCHESTRATOR_URL = .*over libp2p, not over HTTP"),
        ({"ORCHESTRATOR_URL": "tcp://host:1"}, r"ORCHESTRATOR_URL = .*keys show --role orchestrator"),
        ({"TESSELLA_ORCHESTRATOR_PEER_ID": "12D3"}, r"TESSELLA_ORCHESTRATOR_PEER_ID = '12D3': .*no Ed25519 peer id"),
    ],
)
def test_a_wrong_variable_is_refused_by_name_and_rule(environ: dict[str, str], wanted: str) -> None:
    with pytest.raises(ConfigurationError, match=wanted):
        load_config(NodeConfig, flags={}, environ={"ORCHESTRATOR_URL": URL, **environ})


def test_every_wrong_setting_is_named_at_once() -> None:
    with pytest.raises(ConfigurationError) as refused:
        node_config(TESSELLA_VRAM_MB="x", TESSELLA_API_PORT="-1")
    assert [line.split(" =")[0] for line in str(refused.value).splitlines()] == [
        "TESSELLA_VRAM_MB",
        "TESSELLA_API_PORT",
    ]


def test_an_orchestrator_is_needed_and_the_error_says_how_to_name_it() -> None:
    with pytest.raises(ConfigurationError, match=r"--orchestrator-url or TESSELLA_ORCHESTRATOR_URL or the TOML key"):
        load_config(NodeConfig, flags={}, environ={})


def test_a_value_is_shown_in_part_only() -> None:
    with pytest.raises(ConfigurationError) as refused:
        node_config(TESSELLA_DEFAULT_MODEL="m" * 5000)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("model_cache_prune", "dry-run"),
        ("registration_grace_secs", 5),
        ("allow_private_addrs", False),
        ("callback_allowed_hosts", "example.org"),
    ],
)
def test_a_key_whose_behaviour_does_not_exist_is_refused_unless_it_asks_for_nothing(name: str, other: object) -> None:
    neutral, _ = NOT_SUPPORTED[name]
    assert getattr(node_config(flags={} if neutral is None else {name: neutral}), name) == neutral
    with pytest.raises(ConfigurationError, match=re.escape(f"--{name} = {other!r}: not supported yet: ")):
        node_config(flags={name: other})


@pytest.mark.parametrize(
    ("given", "announced"),
    [
        ({}, None),
        ({"public_ip": "203.0.113.7"}, None),
        ({"public_ip": "203.0.113.7", "public_api_port": 8443}, "http://203.0.113.7:8443"),
        ({"public_ip": "2001:db8::7", "public_api_port": 80}, "http://[2001:db8::7]:80"),
        ({"public_api_url": "https://pod-8080.proxy.example"}, "https://pod-8080.proxy.example"),
    ],
)
def test_an_api_address_is_announced_where_the_configuration_names_one(
    given: dict[str, object], announced: str | None
) -> None:
    assert node_config(flags={**given, "api_keys": "required"}).announced_api_url == announced


@pytest.mark.parametrize(
    "given",
    [
        {"public_api_port": 80},
        {"public_ip": "203.0.113.7", "public_api_port": 80, "public_api_url": "https://a.example"},
        {"public_api_url": "ftp://a.example"},
        {"public_api_url": "javascript:alert(1)"},
        {"public_api_url": "https://"},
        {"public_api_url": "https://user@a.example"},
        {"public_api_url": "https://a.example/?q"},
        {"public_api_url": "https://a.example:99999"},
        {"public_api_url": "https://a b.example"},
    ],
)
def test_an_api_address_that_no_client_can_be_sent_to_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=r"public_api|public_ip"):
        node_config(flags=given)


def test_the_table_of_what_is_not_supported_names_settings_at_their_defaults() -> None:
    config = node_config()
    assert {name: neutral for name, (neutral, _) in NOT_SUPPORTED.items()} == {
        name: getattr(config, name) for name in NOT_SUPPORTED
    }


@pytest.mark.parametrize(
    ("quantization", "recipe"),
    [("none", "f32"), ("Q8_0", "q8_0"), ("INT8", "q8_0"), ("Q4_0", "q4_0"), ("INT4", "q4_0")],
)
def test_quantization_is_the_manuals_key_for_a_recipe(quantization: str, recipe: str) -> None:
    assert node_config(TESSELLA_QUANTIZATION=quantization).recipe == recipe
    assert node_config(TESSELLA_QUANTIZATION=quantization, TESSELLA_RECIPE=recipe).recipe == recipe


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"TESSELLA_QUANTIZATION": "Q8_0", "TESSELLA_RECIPE": "f32"}, "means recipe = 'q8_0', and recipe is 'f32'"),
        ({"TESSELLA_QUANTIZATION": "Q5_K"}, "TESSELLA_QUANTIZATION = 'Q5_K': .*'Q8_0'"),
        ({"TESSELLA_DEVICE": "cuda", "TESSELLA_RECIPE": "f32"}, "'f32' is computed on the CPU alone; .*torch-f16"),
        ({"TESSELLA_DEVICE": "metal", "TESSELLA_QUANTIZATION": "INT4"}, "'q4_0' is computed on the CPU alone"),
        ({"TESSELLA_DEVICE": "cuda", "TESSELLA_RECIPE": "torch-int4"}, "'torch-int4' is computed on the CPU alone"),
    ],
)
def test_a_recipe_that_quantization_or_device_contradicts_is_refused(variables: dict[str, str], wanted: str) -> None:
    with pytest.raises(ConfigurationError, match=wanted):
        load_config(NodeConfig, flags={}, environ={"ORCHESTRATOR_URL": URL, **variables})


def test_a_device_has_the_recipes_that_are_computed_on_it() -> None:
    config = node_config(TESSELLA_DEVICE="cuda", TESSELLA_RECIPE="torch-f16")
    assert (config.device, config.recipe) == ("cuda", "torch-f16")


def test_a_quantization_that_is_no_text_is_refused(toml: Any) -> None:
    with pytest.raises(ConfigurationError, match="quantization"):
        node_config(toml('quantization = ["Q8_0"]'))


def test_a_private_mesh_lists_peer_ids() -> None:
    config = load_config(OrchestratorConfig, flags={}, environ={"TESSELLA_ALLOW": f"{PEER}, "})
    assert config.allow == (PEER,)
    with pytest.raises(ConfigurationError, match="TESSELLA_ALLOW"):
        load_config(OrchestratorConfig, flags={}, environ={"TESSELLA_ALLOW": "everybody"})


SECOND = NodeKey(bytes([1]) * 32).peer_id
THIRD = NodeKey(bytes([2]) * 32).peer_id


def address_of(peer: str) -> str:
    return f"/ip4/10.0.0.1/tcp/9090/p2p/{peer}"


def test_further_orchestrators_are_pinned_and_keep_their_order() -> None:
    assert node_config().standbys == ()
    listed = ",".join(address_of(peer) for peer in (THIRD, PEER, SECOND, THIRD))
    config = node_config(TESSELLA_ORCHESTRATORS=listed)
    assert [standby.peer_id for standby in config.standbys] == [THIRD, SECOND], "the first one is named already"
    with pytest.raises(ConfigurationError, match="TESSELLA_ORCHESTRATORS"):
        node_config(TESSELLA_ORCHESTRATORS="/ip4/10.0.0.1/tcp/9090")


def test_a_federation_lists_pinned_addresses_and_a_limit_of_trust() -> None:
    config = load_config(
        OrchestratorConfig, flags={}, environ={"TESSELLA_FEDERATION": address_of(SECOND), "TESSELLA_TRUST_LIMIT": "5"}
    )
    assert (config.federation, config.trust_limit) == ((address_of(SECOND),), 5)
    many = ",".join(address_of(NodeKey(bytes([number]) * 32).peer_id) for number in range(17))
    for environ in (
        {"TESSELLA_FEDERATION": "/ip4/10.0.0.1/tcp/9090"},
        {"TESSELLA_FEDERATION": many},
        {"TESSELLA_TRUST_LIMIT": "-1"},
        {"TESSELLA_TRUST_LIMIT": str(2**53)},
    ):
        with pytest.raises(ConfigurationError, match=next(iter(environ))):
            load_config(OrchestratorConfig, flags={}, environ=environ)


def test_threads_are_one_for_each_core_of_the_node_unless_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 5, 7}, raising=False)
    assert node_config(flags={"recipe": "f32"}).compute_threads == 4
    assert node_config(flags={"recipe": "f32", "cpus": "0,1,2"}).compute_threads == 3
    assert node_config(flags={"recipe": "f32", "cpus": "0,1,2", "threads": 1}).compute_threads == 1
    assert node_config(flags={"recipe": "torch-f32"}).compute_threads == 2
    assert node_config(TESSELLA_CPUS="4,5").cpus == (4, 5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cpus", "-1"),
        ("cpus", "a"),
        ("cpus", "0.5"),
        ("sleep_after_secs", "-1"),
        ("sleep_after_secs", "inf"),
        ("sleep_after_secs", "nan"),
        ("oom_streak", "0"),
        ("streak_window_secs", "0"),
    ],
)
def test_rules_of_a_stage_that_make_no_sense_are_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--{name}"):
        node_config(flags={name: value})
