"""The documentation site builds without warnings, and its links lead to the right lines of code."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocstrings")
pytestmark = pytest.mark.integration
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING -" not in done.stderr
    return folder


def test_every_detail_links_to_its_line(site):
    table = (site / "details" / "index.html").read_text()
    links = re.findall(r'href="../(source/[^"#]+/)#([^"]+)">([^<:]+):(\d+)<', table)
    assert len(links) >= 36
    classic = (site / "classic" / "index.html").read_text()
    assert 'href="../details/"' in classic, "which has no table of its own"
    for page, anchor, path, line in links:
        assert f'id="{anchor}"' in (site / page / "index.html").read_text(), (path, line)


def test_the_first_page_is_the_readme_and_the_api_has_docstrings(site):
    assert "Faithful" in (site / "index.html").read_text()
    api = (site / "api" / "index.html").read_text()
    assert "Weight of longer returns in the advantage estimate" in api
    assert api.count("doc-function") > 20
