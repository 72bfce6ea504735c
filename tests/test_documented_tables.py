"""Documented tables equal the output of their scripts."""

from pathlib import Path

import pytest

from benchmarks import candidate_table, dm_control_table

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize(
    ("script", "page"), [(candidate_table, "best.md"), (dm_control_table, "continuous.md")]
)
def test_a_documented_table_is_that_of_its_script(script, page, capsys):
    script.main([])
    for table in capsys.readouterr().out.split("\n\n"):
        assert table.count("\n") > 4
        assert table in (DOCS / page).read_text()
