"""Kernels that are compiled where they run: optional, made once, made again when damaged or out of date."""

import shutil

import pytest
import torch

from fly_cli import bf16_gemm, c_kernels, int4_kernel, row_attention
from fly_cli.c_kernels import AVX2, compiled

KERNELS = {"gemm": bf16_gemm.bf16_gemm, "attention": row_attention.row_attention, "int4": int4_kernel.int4_kernel}
MODULES = {"gemm": bf16_gemm, "attention": row_attention, "int4": int4_kernel}
CONSTANTS = {
    "gemm": bf16_gemm.FORMS[-1].constants,
    "attention": row_attention.CONSTANTS,
    "int4": int4_kernel.CONSTANTS,
}
SOURCES = {name: (module.SOURCE, CONSTANTS[name]) for name, module in MODULES.items()}


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A machine with AVX2 and a cache of its own, on which no kernel was asked for yet."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setenv("FLY_CACHE", str(tmp_path / "cache"))
    for kernel in KERNELS.values():
        kernel.cache_clear()
    yield
    for kernel in KERNELS.values():
        kernel.cache_clear()


@pytest.fixture
def compiles(compiled_kernel):
    """Skips where nothing can be compiled."""


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("trouble", ["no compiler", "broken compiler", "no room", "library of another machine"])
def test_without_a_kernel_there_is_none_and_no_error(tmp_path, monkeypatch, name, trouble):
    if trouble == "no compiler":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    elif trouble == "broken compiler":
        monkeypatch.setattr(shutil, "which", lambda name: "/bin/false")
    elif trouble == "no room":
        (tmp_path / "cache").write_text("a file")
    else:
        (tmp_path / "garbage.so").write_bytes(b"garbage")
        monkeypatch.setattr(c_kernels, "compiled", lambda *given: tmp_path / "garbage.so")
    assert KERNELS[name]() is None
    assert not list(tmp_path.glob("cache/kernels/*"))


@pytest.mark.usefixtures("compiles")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("name", KERNELS)
def test_where_the_chosen_compiler_fails_gcc_is_tried(monkeypatch, name):
    monkeypatch.setenv("CC", "/bin/false")
    assert KERNELS[name]() is not None


@pytest.mark.usefixtures("compiles")
@pytest.mark.parametrize("name", KERNELS)
def test_a_library_that_was_damaged_is_made_again(name):
    library = compiled(*SOURCES[name], AVX2)
    size = library.stat().st_size
    library.write_bytes(b"")
    assert KERNELS[name]() is not None
    assert library.stat().st_size == size


@pytest.mark.usefixtures("compiles")
@pytest.mark.parametrize("name", KERNELS)
def test_a_library_without_the_functions_is_not_kept(tmp_path, name):
    other = tmp_path / "other.c"
    other.write_text("int other(void) { return 1; }")
    library = compiled(*SOURCES[name], AVX2)
    shutil.copy(compiled(other, {}, AVX2), library)
    assert KERNELS[name]() is None  # a process loads a name once: the next one gets a new library
    assert not library.exists()


@pytest.mark.usefixtures("compiles")
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_whose_results_are_wrong_is_not_used(monkeypatch, name):
    monkeypatch.setattr(MODULES[name], "is_right", lambda kernel: False)
    assert KERNELS[name]() is None


@pytest.mark.usefixtures("compiles")
def test_a_library_is_compiled_once_and_anew_when_its_source_or_header_changes(tmp_path, monkeypatch):
    commands, run = [], c_kernels.run
    monkeypatch.setattr(c_kernels, "run", lambda command: commands.append(command) or run(command))
    source, header = tmp_path / "one.c", tmp_path / "one.h"
    source.write_text('#include "one.h"\nint one(void) { return ONE; }')
    header.write_text("// old")

    def library(one=1):
        return compiled(source, {"ONE": one}, AVX2)

    first = library()
    assert library() == first and len(commands) == 2  # to compile, to link
    others = [library(one=2)]
    header.write_text("// new")
    others.append(library())
    source.write_text('#include "one.h"\nint one(void) { return -ONE; }')
    others.append(library())
    assert len({first, *others}) == 4 and len(commands) == 8
    assert [c_kernels.functions(one).one() for one in (first, *others)] == [1, 2, 1, -1]


def test_the_digest_of_all_kernels_tells_a_change_of_each_source_and_header(tmp_path, monkeypatch):
    monkeypatch.setattr(c_kernels, "__file__", str(tmp_path / "c_kernels.py"))
    texts = {"one.h": "// one", "one.c": '#include "one.h"', "two.c": "// two"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    digests = {c_kernels.digest_of_sources()}
    for name in texts:
        (tmp_path / name).write_text(texts[name] + "\n// new")
        digests.add(c_kernels.digest_of_sources())
    assert len(digests) == 4
