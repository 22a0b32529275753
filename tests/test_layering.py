"""The layers of the package: imports only point to an earlier row, or leftwards within a row."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rpc_reading_service

VALUES = ["errors", "messages"]
PURE = ["codec", "recycling", "protocol", "pool", "actions", "links", "progress", "session"]
PURE += ["merge", "statistics", "checkpoint"]
EFFECTS = [
    "logs",
    "security",
    "buffers",
    "usage",
    "segments",
    "floods",
    "transport",
    "resolver",
    "stream",
    "lanes",
    "ownership",
]
EFFECTS += ["pinning", "inplace", "graph", "metrics"]
PROCESSES = ["dispatch", "worker", "origin", "daemon", "intake", "client"]
EDGES = ["launchers", "display", "preparation", "reading_service", "testing", "status", "cli", "preload", "__main__"]
ORDER = VALUES + PURE + EFFECTS + PROCESSES + EDGES
USERS = {"zmq": {"transport", "security"}, "torchdata": {"graph", "pinning", "reading_service", "preload"}}
NOT_PURE = {"threading", "socket", "zmq", "time", "os", "subprocess"}

PACKAGE = "rpc_reading_service"
ROOT = Path(rpc_reading_service.__file__).parent
FILES = {path.relative_to(ROOT).with_suffix("").as_posix(): path for path in ROOT.rglob("*.py")}
MODULES = sorted(FILES.keys() - {"__init__"})


def imports(source: str) -> set[tuple[str, ...]]:
    """What a module of the flat package imports, at any depth, as split names; ``from x import y`` is (x, y)."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, [PACKAGE if node.level else "", node.module]))
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return {tuple(name.split(".")) for name in names - {f"{PACKAGE}.__version__"}}


def inner(source: str) -> set[str]:
    return {(*parts, "__init__")[1] for parts in imports(source) if parts[0] == PACKAGE}


def outer(source: str) -> set[str]:
    return {parts[0] for parts in imports(source)} - {PACKAGE}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_to_an_earlier_row_or_leftwards(module: str) -> None:
    assert module in ORDER, f"{module} is in no row of the table"
    assert inner(FILES[module].read_text()) <= set(ORDER[: ORDER.index(module)])


@pytest.mark.parametrize("module", MODULES)
def test_zmq_and_torchdata_are_imported_only_where_they_belong(module: str) -> None:
    assert not {library for library, users in USERS.items() if module not in users} & outer(FILES[module].read_text())


@pytest.mark.parametrize("module", sorted(FILES.keys() & set(PURE)))
def test_pure_modules_import_nothing_that_has_effects(module: str) -> None:
    assert not NOT_PURE & outer(FILES[module].read_text())


def test_the_package_itself_loads_its_modules_only_on_demand() -> None:
    script = f"import sys, {PACKAGE}; print(*[name for name in sys.modules if name.startswith('{PACKAGE}.')])"
    assert subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout == "\n"


@pytest.mark.parametrize(
    "line",
    [
        "import rpc_reading_service.codec as c",
        "from rpc_reading_service import codec",
        "from rpc_reading_service.codec import encode",
        "from . import codec",
        "from .codec import encode",
        "if TYPE_CHECKING:\n    from .codec import encode",
        "def later():\n    import rpc_reading_service.codec",
    ],
)
def test_no_way_to_import_is_overlooked(line: str) -> None:
    assert inner(line) == {"codec"}
