"""Hooks of the documentation site: README as first page, details, code, and a page for each linked file."""

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from ppo_lightning.commands.details import DETAILS, places

ROOT = Path(__file__).parent.parent
LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".toml": "toml",
    ".txt": "text",
    ".csv": "text",
    ".json": "json",
    ".sh": "bash",
}
MANIFEST = ROOT / "ppo_lightning/algorithms/manifest.py"
IMAGES = (".png", ".gif", ".svg")
CODE = re.compile(r"^\[`([\w.]+)`\]\(source/([\w/]+\.py)\.md\)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages: the first page, the details, and every file that a page links to."""
    pages = {"index.md": (ROOT / "README.md").read_text(), "details.md": details_page()}
    pages |= {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md")}
    linked = set(re.findall(r'"../source/([^"#]+)/#', pages["details.md"]))
    for name, text in pages.items():
        folder = ROOT if name == "index.md" else ROOT / "docs"
        linked |= {str(path.relative_to(ROOT)) for path in _targets(text, folder) if path.suffix in LANGUAGES}
    for name in ("index.md", "details.md"):
        files.append(File.generated(config, name, content=pages[name]))
    for name in sorted(linked):
        path = ROOT / name
        shown = path.read_text()[:200_000]
        content = (
            f"---\nsearch: {{exclude: true}}\n---\n# {name}\n\n````{LANGUAGES[path.suffix]}\n{shown}\n````\n"
        )
        files.append(File.generated(config, f"source/{name}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Include code, and point links to files to the pages of the files.

    A line that is only a link to a function becomes the code of the function. Links to folders and notebooks
    become plain text.
    """
    uri = page.file.src_uri
    if uri.startswith("source/") or uri == "details.md":
        return markdown
    folder = ROOT if uri == "index.md" else ROOT / "docs"

    def replace(match: re.Match[str]) -> str:
        target, anchor = match.group(1), match.group(2) or ""
        path = (folder / target).resolve()
        if path == MANIFEST:
            return "](details.md)"  # the table that is generated from the manifest
        if ":" in target or not path.is_relative_to(ROOT):
            return match.group(0)
        if path.suffix in (".md", *IMAGES) and path.is_relative_to(ROOT / "docs"):
            return f"]({path.relative_to(ROOT / 'docs')}{anchor})"
        if path.suffix in LANGUAGES and path.is_file():
            return f"](source/{path.relative_to(ROOT)}.md)"
        return "](#)" if path.exists() else match.group(0)

    markdown = re.sub(r"\[([^\[\]]+)\]\(#\)", r"\1", LINK.sub(replace, markdown))
    return CODE.sub(lambda match: f"{match[0]}\n\n{code_block(ROOT / match[2], match[1])}", markdown)


def code_block(path: Path, name: str) -> str:
    """Return the code of a function, ``function`` or ``Class.method``, without its docstring."""
    source = path.read_text()
    node: Any = ast.parse(source)
    for part in name.split("."):
        node = next((child for child in node.body if getattr(child, "name", None) == part), None)
        assert node is not None, f"{path} has no {name}, which a page of the documentation shows"
    lines = source.splitlines()
    if ast.get_docstring(node):
        for number in range(node.body[0].lineno - 1, node.body[0].end_lineno):
            lines[number] = ""
    code = textwrap.dedent("\n".join(line for line in lines[node.lineno - 1 : node.end_lineno] if line))
    return f"```python\n{code}\n```"


def _targets(text: str, folder: Path) -> list[Path]:
    targets = [
        (folder / match.group(1)).resolve() for match in LINK.finditer(text) if ":" not in match.group(1)
    ]
    return [path for path in targets if path.is_file() and path.is_relative_to(ROOT)]


def details_page() -> str:
    """Return the table of the implementation details, with a link to the line of each detail."""
    about = """# The implementation details

The details of Huang et al., "The 37 Implementation Details of Proximal Policy Optimization" (2022), with
their auxiliary details (A) and two of Procgen (P).
`ppo-lightning details --config RECIPE.yaml` prints the values in a recipe.
"""
    lines = [about, "| | detail | code |\n|---|---|---|"]
    line_of = places()
    for number, (title, _) in DETAILS.items():
        path, line = line_of[number].rsplit(":", 1)
        # HTML, because MkDocs does not know the anchors of lines, which a plugin creates, and would warn.
        link = f'<a href="../source/{path}/#__codelineno-0-{line}">{path}:{line}</a>'
        lines.append(f"| {number} | {title} | {link} |")
    return "\n".join(lines) + "\n"
