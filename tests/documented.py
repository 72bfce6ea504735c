"""What the documentation tells a reader to type: the commands, snippets and settings in README.md and docs/."""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md", *sorted((ROOT / "docs").glob("*.md")),
]  # fmt: skip
LIGHTNING = ("fit", "validate", "test", "predict")
INLINE = re.compile(
    r"(?<!`)`((?:ppo-lightning \w+|fit|validate|test|predict) [^`\n]*--(?:config|ckpt_path|recipes)\b(?! \.\.\.`)[^`\n]*"
    r"|python [^`\n]+|pytest [^`\n]+|make [\w-]+|pip install [^`\n]+)`(?!`)"
)


class Block(NamedTuple):
    """A fenced block (language, text), or a command in a sentence (language ``inline``)."""

    language: str
    text: str


def blocks(document: Path) -> list[Block]:
    """Returns the fenced blocks and the whole commands in sentences of a document, in order."""
    text = document.read_text()
    fenced = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
    found = [(match.start(), Block(match[1], match[2])) for match in fenced.finditer(text)]
    prose = fenced.sub(lambda match: " " * len(match[0]), text)
    found += [(match.start(), Block("inline", match[1])) for match in INLINE.finditer(prose)]
    return [block for _, block in sorted(found)]


def commands(block: Block) -> list[str]:
    """Returns the commands of a block, one a line, without comments."""
    if block.language not in ("bash", "inline"):
        return []
    lines = block.text.replace("\\\n", " ").splitlines()
    found = [" ".join(re.sub(r"(^|\s)#.*", "", line).split()) for line in lines]
    return [f"ppo-lightning {line}" if line.startswith(LIGHTNING) else line for line in found if line]


def all_commands() -> dict[str, Path]:
    """Returns every command with the first document that has it."""
    found: dict[str, Path] = {}
    for document in DOCUMENTS:
        for block in blocks(document):
            for command in commands(block):
                found.setdefault(command, document)
    return found


def words(command: str, folder: Path) -> list[str]:
    """Returns the words of a command as bash has them in a folder (quotes, braces, ``*``)."""
    script = f"printf '%s\\0' {command}"
    out = subprocess.run(
        ["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=True
    ).stdout
    return out.split("\0")[:-1]


def flags_of(recipe: Path) -> list[str]:
    """Returns the flags that the comments of a recipe name."""
    comments = " ".join(re.findall(r"#(.*)", recipe.read_text()))
    return [word for pair in re.findall(r"(--[\w.]+) ([\w./-]*\w)", comments) for word in pair]
