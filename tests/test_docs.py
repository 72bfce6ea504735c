"""The documentation site builds without warnings, and its links lead to the right lines of code."""

import re
import subprocess
import sys

import pytest

from tests.helpers import ROOT

pytest.importorskip("mkdocstrings")
pytestmark = pytest.mark.integration


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
    first = (site / "index.html").read_text()
    assert "Four statements of Python" in first
    navigation = first.split("md-nav--primary")[1]
    titles = re.findall(r'<span class="md-ellipsis">\s*(.*?)\s*<', navigation)
    assert "Home" in titles
    assert "ppo_lightning" not in titles, "which stands above the navigation"
    api = (site / "api" / "index.html").read_text()
    assert "Weight of longer returns in the advantage estimate" in api
    assert api.count("doc-function") > 20


def test_every_picture_of_a_page_exists(site):
    pictures = 0
    for page in site.rglob("index.html"):
        for source in re.findall(r'<img[^>]* src="([^":]+)"', page.read_text()):
            assert (page.parent / source).resolve().is_file(), (page, source)
            pictures += 1
    assert pictures > 5


def test_the_page_of_an_iteration_contains_the_code(site):
    page = (site / "iteration" / "index.html").read_text()
    code = re.sub(r"<[^>]+>", "", page)
    assert "def training_step(self, rollout" in code
    assert "def gae(" in code
