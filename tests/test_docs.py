"""The documents: their Python runs, their errors are the code's, their links lead somewhere.

Every Python block of a document runs as a script of its own, with the two daemons of the session in the place of its
``cpu1:5555`` and ``cpu2:5555``. A block that cannot run has ``<!-- not run: why -->`` in the line above it.
"""

import ast
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import rpc_reading_service
from rpc_reading_service import cli, errors
from rpc_reading_service.reading_service import RPCReadingService

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]
ADDRESSES = ["cpu1:5555", "cpu2:5555"]
NOT_RUN = re.compile(r"<!-- not run: .+ -->")
LINK = re.compile(r"\]\(([^)\s]+)\)")
TIMEOUT_S = 100.0

# One interpreter for each document, since importing torch takes longer than most blocks do.
RUN_EACH = "import runpy, sys; [runpy.run_path(path, run_name='__main__') for path in sys.argv[1:]]"
# What torchrun would set.
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


class Block(NamedTuple):
    """A fenced block of a document."""

    language: str
    line: int
    """Of its first line of code, from 1."""
    code: str
    runs: bool


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a Markdown text."""
    found, lines, start = [], text.splitlines(), None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        above = lines[start - 1] if start else ""
        language, code = lines[start].removeprefix("```"), "\n".join(lines[start + 1 : number])
        found.append(Block(language, start + 2, code, not NOT_RUN.fullmatch(above)))
        start = None
    return found


def python_blocks(document: str) -> list[Block]:
    return [block for block in blocks((ROOT / document).read_text()) if block.language == "python"]


WITH_PYTHON = [document for document in DOCUMENTS if any(block.runs for block in python_blocks(document))]


@pytest.mark.parametrize("document", WITH_PYTHON)
def test_python_blocks_run(document: str, two_daemons: list[str], free_port: int, tmp_path: Path) -> None:
    paths = [write(block, document, two_daemons, tmp_path) for block in python_blocks(document) if block.runs]
    environment = {**os.environ, **ONE_RANK, "MASTER_PORT": str(free_port)}
    command = [sys.executable, "-c", RUN_EACH, *map(str, paths)]
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr


def write(block: Block, document: str, addresses: list[str], folder: Path) -> Path:
    """Line numbers in tracebacks are those of the document."""
    code = "\n" * (block.line - 1) + block.code + "\n"
    for written, real in zip(ADDRESSES, addresses, strict=True):
        code = code.replace(written, real)
    path = folder / f"{Path(document).stem}_{block.line}.py"
    path.write_text(code)
    return path


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_blocks_are_python_even_if_they_do_not_run(document: str) -> None:
    for block in python_blocks(document):
        ast.parse(block.code, f"{document}, the block at line {block.line}")


def test_every_error_class_is_in_errors_md() -> None:
    text = (ROOT / "docs/errors.md").read_text()
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert classes == {name for name in re.findall(r"^## `(\w+)`", text, re.MULTILINE) if hasattr(errors, name)}


def test_every_parameter_is_explained_where_it_is_defined() -> None:
    arguments = inspect.cleandoc(RPCReadingService.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^    (\w+): ", arguments, re.MULTILINE) == [*inspect.signature(RPCReadingService).parameters]


def test_every_public_name_is_in_the_reference() -> None:
    shown = set(re.findall(r"^::: (\S+)$", (ROOT / "docs/reference.md").read_text(), re.MULTILINE))
    for name in rpc_reading_service.__all__:
        public = getattr(rpc_reading_service, name)
        assert {f"{public.__module__}.{name}", public.__module__} & shown, name


SHELL = [
    (document, block.line, line)
    for document in DOCUMENTS
    for block in blocks((ROOT / document).read_text())
    if block.language == "bash"
    for line in block.code.replace("\\\n", " ").splitlines()
    if line.startswith("rpc-reading-worker ")
]


@pytest.mark.parametrize(("document", "line", "command"), SHELL)
def test_command_lines_have_the_options_that_there_are(document: str, line: int, command: str) -> None:
    name, *arguments = shlex.split(command, comments=True)
    subcommand = cli.main.commands.get(arguments[0])
    assert (subcommand or cli.main).make_context(name, arguments[1:] if subcommand else arguments)


def test_every_module_is_in_architecture_md() -> None:
    modules = {path.stem for path in (ROOT / "rpc_reading_service").glob("[!_]*.py")}
    assert modules <= set(re.findall(r"`(\w+)`", (ROOT / "docs/architecture.md").read_text()))


def test_every_test_that_a_document_names_is_there() -> None:
    code = "".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    text = "".join((ROOT / document).read_text() for document in DOCUMENTS)
    named = set(re.findall(r"`(test_\w+|Test[A-Z]\w+)`", text))
    assert named
    assert {name for name in named if not re.search(rf"(def |^){name}\b", code, re.MULTILINE)} == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_relative_links_resolve(document: str) -> None:
    text = (ROOT / document).read_text()
    links = {link for link in LINK.findall(text) if not re.match(r"[a-z]+:", link)}
    folder = (ROOT / document).parent
    assert not {link for link in links if not (folder / link.partition("#")[0]).exists()}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_to_sections_resolve(document: str) -> None:
    folder = (ROOT / document).parent
    for link in LINK.findall((ROOT / document).read_text()):
        target, _, section = link.partition("#")
        if section and not re.match(r"[a-z]+:", link):
            assert section in sections(folder / target if target else ROOT / document), link


def sections(path: Path) -> set[str]:
    """The names that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
