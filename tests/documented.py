"""Find the commands, snippets and settings that README.md, docs/ and benchmarks/ tell a reader to type."""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.helpers import ROOT

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "benchmarks/best.md",
    ROOT / "benchmarks/measurements.md",
]
LIGHTNING = ("fit", "validate", "test")
INLINE = re.compile(
    r"(?<!`)`((?:ppo-lightning \w+|fit|validate|test) [^`\n]*"
    r"--(?:config|ckpt_path|recipes)\b(?! \.\.\.`)[^`\n]*"
    r"|python [^`\n]+|pytest [^`\n]+|make [\w-]+|pip install [^`\n]+)`(?!`)"
)


class Block(NamedTuple):
    """A fenced block (language, text), or a command in a sentence (language ``inline``)."""

    language: str
    text: str


def blocks(document: Path) -> list[Block]:
    """Return the fenced blocks of a document and the commands in its sentences, in order."""
    text = document.read_text()
    fenced = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
    found = [(match.start(), Block(match[1], match[2])) for match in fenced.finditer(text)]
    prose = fenced.sub(lambda match: " " * len(match[0]), text)
    found += [(match.start(), Block("inline", match[1])) for match in INLINE.finditer(prose)]
    return [block for _, block in sorted(found)]


def commands(block: Block) -> list[str]:
    """Return the commands of a block, one per line, without comments."""
    if block.language not in ("bash", "inline"):
        return []
    lines = block.text.replace("\\\n", " ").splitlines()
    found = [" ".join(re.sub(r"(^|\s)#.*", "", line).split()) for line in lines]
    return [f"ppo-lightning {line}" if line.startswith(LIGHTNING) else line for line in found if line]


def all_commands() -> dict[str, Path]:
    """Return every command with the first document that contains it."""
    found: dict[str, Path] = {}
    for document in DOCUMENTS:
        for block in blocks(document):
            for command in commands(block):
                found.setdefault(command, document)
    return found


def words(command: str, folder: Path) -> list[str]:
    """Split a command into words as bash does in a folder (quotes, braces, ``*``)."""
    script = f"printf '%s\\0' {command}"
    out = subprocess.run(
        ["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=True
    ).stdout
    return out.split("\0")[:-1]


def flags_of(recipe: Path) -> list[str]:
    """Return the flags that the comments of a recipe name."""
    comments = " ".join(re.findall(r"#(.*)", recipe.read_text()))
    return [word for pair in re.findall(r"(--[\w.]+) ([\w./-]*\w)", comments) for word in pair]
