"""The settings page: all of them, as they are read."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tessella_p2p.cli.settings_page import settings
from tessella_p2p.node.config import ROLES, NodeConfig, OrchestratorConfig, RoleConfig
from tessella_p2p.node.settings import spelling_of
from tessella_p2p.node.settings_reference import Setting, settings_of

PAGE = Path(__file__).parents[2] / "docs" / "SETTINGS.md"


def of(kind: type[RoleConfig], name: str) -> Setting:
    return next(setting for setting in settings_of(kind) if setting.name == name)


def test_the_page_in_docs_is_what_the_command_prints_now() -> None:
    printed = CliRunner().invoke(settings, [])
    assert printed.exit_code == 0
    assert PAGE.read_text() == printed.stdout, "run `make docs`"


@pytest.mark.parametrize("role", ROLES)
def test_every_setting_that_people_may_give_is_on_it_with_its_rule(role: str) -> None:
    kind = ROLES[role]
    listed = settings_of(kind)
    assert {each.name for each in listed} == {
        name for name, field in kind.model_fields.items() if not spelling_of(field).hidden
    }
    assert all(each.description and each.rule and each.default for each in listed)
    assert all(each.key or each.flags or each.variables for each in listed)


def test_bounds_choices_forms_and_sections_are_told() -> None:
    claim = of(NodeConfig, "vram_mb")
    assert (claim.key, claim.flags, claim.variables) == ("[worker] vram_mb", ("--vram-mb",), ("TESSELLA_VRAM_MB",))
    assert claim.rule == "whole number, at least 256, at most 16777216"
    assert of(NodeConfig, "device").rule == "cuda or metal or cpu"
    assert of(NodeConfig, "api_host").rule == "an IP address"
    assert of(NodeConfig, "bootstrap").rule.startswith("a list, or one text with commas; each /ip4/")
    assert of(NodeConfig, "orchestrator_url").default == "required"


def test_a_secret_is_never_listed_as_a_flag() -> None:
    token = of(OrchestratorConfig, "admin_token")
    assert token.flags == ()
    assert token.variables == ("TESSELLA_ADMIN_TOKEN",)
    assert token.key == "admin_token"


def test_a_key_of_the_manual_that_does_nothing_yet_says_so_where_that_is_so() -> None:
    assert of(NodeConfig, "registration_grace_secs").rule.startswith("nothing yet:")
    assert of(OrchestratorConfig, "registration_grace_secs").rule.startswith("number")
