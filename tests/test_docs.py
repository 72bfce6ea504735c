"""The documentation site builds without a word, and a browser shows it as it is meant."""

import functools
import http.server
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
from urllib.parse import unquote, urlsplit

import pytest

from tests.helpers import ROOT

pytest.importorskip("mkdocstrings")
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # as make docs
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if not line.startswith("INFO ")]
    assert not done.stdout and not said, done.stdout + done.stderr
    return folder


def test_every_detail_links_to_its_line(site):
    table = (site / "details" / "index.html").read_text()
    links = re.findall(r'href="../(source/[^"#]+/)#([^"]+)">([^<:]+):(\d+)<', table)
    assert len(links) >= 36
    classic = (site / "classic" / "index.html").read_text()
    assert 'href="../details/"' in classic, "which has no table of its own"
    for page, anchor, path, line in links:
        assert f'id="{anchor}"' in (site / page / "index.html").read_text(), (path, line)


def test_the_api_has_docstrings_with_readable_types(site):
    pages = {path.parent.name: path.read_text() for path in site.glob("api/*/index.html")}
    assert len(pages) == 8
    assert "Weight of longer returns in the advantage estimate" in pages["algorithms"]
    assert "float in [0, 1]" in pages["algorithms"] and "from ppo_lightning import PPO" in pages["algorithms"]
    assert not [name for name, page in pages.items() if "Annotated" in page]
    assert sum(page.count("doc-function") for page in pages.values()) > 20
    commands = (site / "commands" / "index.html").read_text()
    assert "../api/algorithms/#ppo_lightning.algorithms.ppo.PPO" in commands, "from a link to api.md"


def test_notebooks_have_their_outputs(site):
    pages = [path.read_text() for path in sorted(site.glob("notebooks/*/index.html"))]
    assert len(pages) == 5
    assert all('<img alt="Output of the cell above"' in page for page in pages)
    assert not any("\x1b" in page or "\r" in page for page in pages)


def test_the_page_of_an_iteration_contains_the_code(site):
    page = (site / "iteration" / "index.html").read_text()
    code = re.sub(r"<[^>]+>", "", page)
    assert "def training_step(self, rollout" in code
    assert "def gae(" in code


LOOK = r"""<body><script>
onload = async () => {
  const found = [];
  for (const page of PAGES) for (const width of [1280, 390]) {
    const frame = document.createElement("iframe");
    Object.assign(frame, {width: width, height: 800, src: page});
    document.body.append(frame);
    await new Promise(done => frame.onload = done);
    const shown = frame.contentDocument, root = shown.documentElement;
    found.push({
      page: page, width: width, wider: root.scrollWidth - root.clientWidth,
      pictures: [...shown.images].filter(image => !image.naturalWidth).map(image => image.src),
      roles: shown.body.innerText.match(/:(class|meth|func|attr|mod|data|exc):\S+/g) || [],
      links: [...shown.links].map(link => link.href),
    });
    frame.remove();
  }
  fetch("/found", {method: "POST", body: JSON.stringify(found)});
}
</script>"""


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves the site, and receives what the browser has found."""

    found = queue.Queue()

    def do_POST(self):
        self.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


def test_a_browser_finds_nothing_raw_broken_or_too_wide(site, tmp_path):
    """On each page, as wide as a laptop and a phone. CI sets ``CHROMIUM``, and fails without the browser."""
    browser = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if browser is None:
        pytest.skip("Chromium is not installed")
    pages = [f"/{path.parent.relative_to(site)}/".replace("/./", "/") for path in site.rglob("index.html")]
    pages = sorted(page for page in pages if not page.startswith("/source/"))
    (site / "look.html").write_text(LOOK.replace("PAGES", json.dumps(pages)))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    chromium = subprocess.Popen([browser, *flags, f"{address}/look.html"], stderr=subprocess.DEVNULL)
    try:
        found = Server.found.get(timeout=300)
    finally:
        chromium.kill()
        chromium.wait()
        server.shutdown()
    assert len(found) == 2 * len(pages) > 80
    for look in found:
        where = f"{look['page']} at {look['width']} pixels"
        assert not look["pictures"] and not look["roles"], where
        assert look["wider"] <= 0, f"{where} is {look['wider']} pixels too wide"
        for link in filter(lambda link: link.startswith(address), look["links"]):
            parts = urlsplit(link)
            file = site / unquote(parts.path).lstrip("/")
            file = file / "index.html" if file.is_dir() else file
            assert file.is_file(), f"{where}: {link}"
            anchor = unquote(parts.fragment)
            assert not anchor or f'id="{anchor}"' in file.read_text(), f"{where}: {link}"
