"""What a model costs: the operator's file, and what this machine measures for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tessella_p2p.base.errors import ConfigurationError
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.cli.main import cli
from tessella_p2p.model.gguf import GgmlType
from tessella_p2p.node.terms_file import format_terms, parse_terms
from tessella_p2p.orchestrator.terms import ModelTerms, ServedModel
from tests.model.tiny_gguf import write_tiny_llama

TERMS = ModelTerms(
    total_layers=30,
    layer_mb=5,
    kv_mb=12,
    embedding_mb=30,
    head_mb=31,
    overhead_mb=180,
    min_mb=256,
    layer_cost=700_000,
    embedding_cost=900,
    head_cost=5_600_000,
)


def test_a_table_that_was_written_is_read_back() -> None:
    text = format_terms("m", "f32", "cpu", TERMS) + format_terms("other", "f32", "cpu", TERMS)
    assert parse_terms(text, "m", 30) == {("f32", "cpu"): TERMS}
    assert parse_terms("", "m", 30) == {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("layer_mb = 5", "layer_mb = -5"), "terms.0.layer_mb"),
        (("layer_mb = 5", 'layer_mb = "5"'), "terms.0.layer_mb"),
        (("layer_mb = 5", "layers_mb = 5"), "terms.0.layer"),
        (("layer_cost = 700000", "layer_cost = 0"), "terms.0.layer_cost"),
        (("usable_pct = 90", "usable_pct = 101"), "terms.0.usable_pct"),
        (("[[terms]]", "[terms]"), "terms"),
        (("[[terms]]", "[[terms"), "no TOML"),
        (("[[terms]]", "[[other]]"), "other"),
        (('"f32"', '"torch-f32@2.13.0-avx2-00000001"'), "one table for a recipe"),
    ],
)
def test_a_wrong_file_is_refused_by_its_place(change: tuple[str, str], said: str) -> None:
    text = format_terms("m", "f32", "cpu", TERMS).replace(*change)
    with pytest.raises(ConfigurationError, match=said):
        parse_terms(text, "m", 30)


def test_two_tables_for_one_pair_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="one table for a recipe"):
        parse_terms(2 * format_terms("m", "f32", "cpu", TERMS), "m", 30)


def test_the_operators_least_claim_raises_every_devices() -> None:
    model = ServedModel("m", bytes(32), bytes(32), 30, {("f32", "cpu"): TERMS, ("f32", "*"): TERMS})
    raised = model.with_least_claim(4096)
    assert {terms.min_mb for terms in raised.terms.values()} == {4096}
    assert raised.terms["f32", "cpu"].claim_mb(LayerRange(3, 4)) == 4096
    assert model.with_least_claim(256) is model


@pytest.mark.parametrize("recipe", ["q8_0", "torch-f32"])
def test_this_machine_measures_a_model(tmp_path: Path, recipe: str) -> None:
    path = write_tiny_llama(tmp_path, matrices=GgmlType.Q8_0)
    shown = CliRunner().invoke(cli, ["models", "terms", str(path), "--recipe", recipe])
    assert shown.exit_code == 0, shown.output
    ((place, terms),) = parse_terms(shown.stdout, path.stem, 3).items()
    assert place == (recipe, "cpu")
    assert terms.layer_cost > 1


def test_a_device_that_a_recipe_does_not_know_is_refused(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path, matrices=GgmlType.Q8_0)
    shown = CliRunner().invoke(cli, ["models", "terms", str(path), "--recipe", "q8_0", "--device", "cuda"])
    assert shown.exit_code == 1
    assert "cuda" in shown.stderr
