"""The layout of the package is part of its design: a file imports only files of its own rank or below."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fly_cli

PACKAGE = Path(fly_cli.__file__).parent
RANKS = [
    {"errors", "events", "progress", "files", "json_text", "yaml_text", "tethered"},
    {"settings", "config", "verify", "schedule", "lookup", "catalog", "gguf_header", "prompts", "stats"}
    | {"score", "intervals", "tuned"},
    {
        "text",
        "templates",
        "detokenize",
        "stops",
        "vocabulary",
        "spelling",
        "sampling",
        "evidence",
        "theme",
        "graphemes",
        "render",
        "streams",
        "commentary",
        "picture",
    }
    | {"bench_rows", "bench_plan"}
    | {"trace", "figures", "report", "tables", "plots", "tune"},
    {
        "storage",
        "hub",
        "wheels",
        "convert",
        "weights",
        "placement",
        "skeleton",
        "cached_model",
        "rope",
        "cpu_linear",
        "cpu_attention",
        "quantized",
        "int4",
        "int4_model",
        "int4_decoder",
        "int4_kernel",
        "int4_onnx",
        "compiled",
        "c_kernels",
        "bf16_gemm",
        "row_attention",
        "panels",
        "lowbit",
        "cache_layers",
        "descriptions",
        "pairing",
        "costs",
        "loading",
        "models",
        "requirements",
    }
    | {"machine", "processes", "team"},
    {"draft", "translate", "answer"},
    {"decode"},
    {"api", "peers", "bench", "check"},
    {"cli", "__main__", "__init__"},
]
RANK_OF = {name: rank for rank, names in enumerate(RANKS) for name in names}
WITHOUT_TORCH = ["errors", "events", "settings", "config", "verify", "schedule", "catalog", "prompts", "stats"]
WITHOUT_TORCH += ["render", "trace", "theme", "commentary", "picture", "report", "cli"]
WITHOUT_TORCH += ["bench_rows", "bench_plan", "processes", "machine", "tune", "tuned"]
HEAVY = {"torch", "transformers", "accelerate"}


def module_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path):
    """First parts of the package's own modules that a file imports, wherever in the file."""
    depth = len(path.relative_to(PACKAGE).parts)  # how many dots reach the package itself
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            yield from [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fly_cli."):
            yield node.module.split(".")[1]


def only_for_types(path: Path) -> set[str]:
    """Modules imported under `if TYPE_CHECKING`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            found |= {(child.module or "").split(".")[0] for child in node.body if isinstance(child, ast.ImportFrom)}
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_its_own_rank_and_below(path):
    name = module_of(path)
    assert name in RANK_OF, f"give {name} a rank"
    for imported in set(imported_modules(path)) - only_for_types(path):
        assert RANK_OF[imported] <= RANK_OF[name], f"{name} imports {imported}"


def test_every_ranked_file_exists():
    there = {module_of(path) for path in FILES}
    assert set(RANK_OF) <= there


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_what_starts_the_command_does_not_import_torch(name):
    code = f"import sys, fly_cli.{name}; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_exists_and_the_list_is_sorted():
    assert list(fly_cli.__all__) == sorted(fly_cli.__all__)
    for name in fly_cli.__all__:
        assert getattr(fly_cli, name) is not None
    assert set(fly_cli.__all__) == set(fly_cli._HOMES)


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        fly_cli.nonsense  # noqa: B018


@pytest.mark.parametrize("first", ["fly_cli.api", "fly_cli.decode", "fly_cli"])
def test_a_public_name_is_no_module_whatever_was_imported_first(first):
    code = f"import {first}\nfrom fly_cli import decode\nprint(type(decode).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "function"
