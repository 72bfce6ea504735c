"""Hooks of the documentation site: details, code, notebooks, pages of linked files, readable docstrings."""

import ast
import base64
import contextlib
import json
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

import ppo_lightning
from ppo_lightning.commands.details import DETAILS, places

ROOT = Path(__file__).parent.parent
DOCS, MEASURED = ROOT / "docs", ROOT / "benchmarks"
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
ANSI = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
ROLE = re.compile(r":(?:class|meth|func|attr|mod|data|obj|exc):`(~?)([^`]+)`")
RANGE = re.compile(r"^Annotated\[(.+?)( \| None)?, Range\((.+?)(?:, (.+))?\)\]$")
VERBATIM = re.compile(r"(^ *```.*?^ *```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
SPACE = re.compile(r"(?<=\d) (?=\d{3}\b|x \d)|(?<=\d x) (?=\d)| (?=± )|(?<=±) ")  # inside of a number


def on_config(config: Any) -> Any:
    """Show the version beside the name, and link to the repository that pyproject.toml names."""
    config.site_name = f"ppo_lightning {ppo_lightning.__version__}"
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    config.repo_url = urls.get("Repository")
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages: the details, the notebooks, and every file that a page links to."""
    pages = {DOCS / "details.md": details_page()}
    for path in (*DOCS.glob("*.md"), *MEASURED.glob("*.md")):
        pages[path] = path.read_text()
        if path.parent == MEASURED:
            files.append(File.generated(config, f"measured/{path.name}", content=pages[path]))
    linked = set(re.findall(r'"../source/([^"#]+)/#', pages[DOCS / "details.md"]))
    for path, text in pages.items():
        targets = _targets(text, path.parent)
        linked |= {str(target.relative_to(ROOT)) for target in targets if target.suffix in LANGUAGES}
    files.append(File.generated(config, "details.md", content=pages[DOCS / "details.md"]))
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for name, content in notebook_files(notebook).items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    for name in sorted(linked):
        path = ROOT / name
        shown = path.read_text()[:200_000]
        fence = f'````{{ .{LANGUAGES[path.suffix]} linenums="1" }}'
        content = f"---\nsearch: {{exclude: true}}\n---\n# {name}\n\n{fence}\n{shown}\n````\n"
        files.append(File.generated(config, f"source/{name}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Include code, and point links to files to the pages of the files.

    A line that is only a link to a function becomes the code of the function. Links to folders become plain
    text. A link to a class in api.md leads to the page that describes the class. Numbers such as 1 000 and
    1 ± 2 stay in one line.
    """
    uri = page.file.src_uri
    if uri.startswith("source/") or uri == "details.md":
        return markdown
    rooms = {
        f"#{name}": f"api/{path.name}"
        for path in (DOCS / "api").glob("*.md")
        for name in re.findall(r"^::: (\S+)", path.read_text(), re.MULTILINE)
    }
    up = "../" * uri.count("/")  # from the folder of the page to that of the pages

    def replace(match: re.Match[str]) -> str:
        target, anchor = match.group(1), match.group(2) or ""
        folder = MEASURED if uri.startswith("measured/") else (DOCS / uri).parent
        path = (folder / target).resolve()
        if path == MANIFEST:
            return f"]({up}details.md)"  # the table that is generated from the manifest
        if ":" in target or not path.is_relative_to(ROOT):
            return match.group(0)
        if path == DOCS / "api.md" and anchor in rooms:
            return f"]({up}{rooms[anchor]}{anchor})"
        if path.suffix == ".ipynb" and path.is_file():
            return f"]({up}notebooks/{path.stem}.md)"
        if path.suffix in (".md", *IMAGES) and path.is_relative_to(DOCS):
            return f"]({up}{path.relative_to(DOCS)}{anchor})"
        if path.suffix in LANGUAGES and path.is_file():
            return f"]({up}source/{path.relative_to(ROOT)}.md)"
        if path.suffix == ".md" and path.parent == MEASURED:
            return f"]({up}measured/{path.name}{anchor})"
        return "](#)" if path.exists() else match.group(0)

    markdown = re.sub(r"\[([^\[\]]+)\]\(#\)", r"\1", LINK.sub(replace, markdown))
    parts = VERBATIM.split(markdown)
    parts[::2] = [SPACE.sub("\u00a0", part) for part in parts[::2]]
    markdown = "".join(parts)
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


def notebook_files(path: Path) -> dict[str, str | bytes]:
    """Return the page of a notebook, with the outputs that are stored in it, and the pictures of the page."""
    parts, files = [], {}
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            parts.append(source.replace("](../docs/", "](../"))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            kind = next((kind for kind in ("image/png", "image/gif") if kind in data), None)
            if kind:
                name = f"{path.stem}_{number}_{len(files)}.{kind[-3:]}"
                files[name] = base64.b64decode("".join(data[kind]))
                parts.append(f"![Output of the cell above]({name})")
            elif text := "".join(output.get("text", data.get("text/plain", ""))):
                lines = [line.split("\r")[-1].rstrip() for line in ANSI.sub("", text).rstrip().split("\n")]
                parts.append("```text\n" + "\n".join(lines) + "\n```")
    return files | {f"{path.stem}.md": "\n\n".join(parts) + "\n"}


def _targets(text: str, folder: Path = DOCS) -> list[Path]:
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


class Docstrings(griffe.Extension):
    """Links in the place of roles, readable ranges of arguments, and how to import each class."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        """Change the docstring and the parameters of an object."""
        if obj.docstring:
            obj.docstring.value = ROLE.sub(lambda match: self.link(obj, *match.groups()), obj.docstring.value)
            if obj.parent and obj.parent.is_module and (obj.is_class or obj.is_function):
                exported = obj.name in ppo_lightning.__all__
                module = "ppo_lightning" if exported else obj.parent.path
                obj.docstring.value = f"`from {module} import {obj.name}`\n\n{obj.docstring.value}"
        for parameter in obj.parameters if obj.is_function else ():
            parameter.annotation = readable(parameter.annotation)

    @staticmethod
    def link(obj: Any, short: str, name: str) -> str:
        """Return the name as code, which links to its description if there is one."""
        shown = name.rpartition(".")[2] if short else name
        owner = obj if obj.is_class else obj.parent
        path = name
        if not name.startswith("ppo_lightning."):
            first, _, rest = name.partition(".")
            if owner.is_class and not rest and first in owner.all_members:
                path = owner.all_members[first].path
            else:
                with contextlib.suppress(griffe.NameResolutionError):
                    path = ".".join(filter(None, (obj.resolve(first), rest)))
        return f'<autoref identifier="{path}" optional><code>{shown}</code></autoref>'


def readable(annotation: Any) -> Any:
    """Return ``float in [0, 1]`` for ``Annotated[float, Range(0, 1)]``."""
    match = RANGE.match(str(annotation))
    if not match:
        return annotation
    kind, none, low, high = match.groups(default="")
    if low == "-math.inf":
        return kind + none
    return kind + (f" in [{low}, {high}]" if high not in ("", "math.inf") else f" >= {low}") + none
