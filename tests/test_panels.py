"""Layers in panels: the same products, prepared once for a large model, and in memory where they cannot be kept."""

import os
import shutil
import weakref

import pytest
import torch
from models_for_tests import tiny_llama
from torch import nn

from fly_cli import cpu_linear, panels
from fly_cli.bf16_gemm import FORMS, Gemm, bf16_gemm
from fly_cli.cached_model import CachedModel
from fly_cli.cpu_linear import PackedLinear, WideningLinear, keep_fast_linears, speed_up_linears
from fly_cli.files import realm
from fly_cli.panels import PanelLinear
from fly_cli.progress import Silent


class Notes(Silent):
    """A progress that keeps what it was told."""

    def __init__(self):
        self.started, self.notes, self.bytes = [], [], 0

    def start(self, description, total):
        self.started.append((description, total))

    def advance(self, amount):
        self.bytes += amount

    def note(self, text):
        self.notes.append(text)


pytestmark = pytest.mark.usefixtures("panels_folder")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_text("weights")
    return folder


def model(seed=0):
    return tiny_llama(seed, initializer_range=0.1).bfloat16()


def keep(folder, seed=0):
    told = Notes()
    keep_fast_linears(model(seed).requires_grad_(False), folder, "tiny", told)
    return told


def logits(model, folder=None, layers=2):
    assert speed_up_linears(model, folder) == layers * 7 + 1
    return CachedModel(model, name="tiny").read(list(range(5, 45)), last=20)


def kept(tmp_path):
    return list((tmp_path / "cache" / "panels").rglob("*.bin"))


def test_a_kept_model_is_mapped_and_the_same_as_one_prepared_in_memory(folder, tmp_path):
    told = keep(folder)
    (file,) = kept(tmp_path)
    assert (told.started, told.notes) == ([("preparing tiny for this CPU, once", told.bytes)], [])
    assert file.stat().st_size == told.bytes
    assert torch.equal(logits(model(), folder), logits(model()))
    shown = model()
    speed_up_linears(shown, folder)
    layers = [layer for layer in shown.modules() if isinstance(layer, PanelLinear)]
    assert len({layer.packed.untyped_storage().data_ptr() for layer in layers}) == 1  # all are pieces of the file


def test_what_is_kept_is_not_made_again(folder, tmp_path):
    keep(folder)
    (file,) = kept(tmp_path)
    before = file.stat()
    assert keep(folder).started == []
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("change", ["time", "nothing else", "layers", "cut short", "empty"])
def test_what_is_not_of_these_weights_is_not_used_and_made_again(folder, tmp_path, change):
    keep(folder)
    (file,) = kept(tmp_path)
    seed, layers = 1, 2
    if change == "time":
        os.utime(folder / "model.safetensors", (1, 1))
    elif change == "layers":
        layers = 1
    elif change in ("cut short", "empty"):
        seed = 0
        os.truncate(file, 0 if change == "empty" else file.stat().st_size - 2)

    def shown():
        return tiny_llama(seed, initializer_range=0.1, num_hidden_layers=layers).bfloat16().requires_grad_(False)

    right = logits(shown(), layers=layers)
    assert torch.equal(logits(shown(), folder, layers), right)
    told = Notes()
    keep_fast_linears(shown(), folder, "tiny", told)
    assert told.started
    assert len(kept(tmp_path)) == 1  # what was of other weights has gone
    assert torch.equal(logits(shown(), folder, layers), right)


def test_a_file_that_is_right_at_its_beginning_alone_is_not_used(folder, tmp_path):
    keep(folder)
    (file,) = kept(tmp_path)
    with file.open("r+b") as stream:
        stream.seek(-4000, os.SEEK_END)
        stream.write(bytes(4000))
    assert torch.equal(logits(model(), folder), logits(model()))
    assert keep(folder).started


def test_another_order_has_another_file(folder, monkeypatch):
    layers, gemm = cpu_linear.plain_linears(model()), bf16_gemm()
    files = [panels.panels_file(folder, layers, Gemm(gemm.library, form)) for form in FORMS]
    monkeypatch.setattr(panels, "FORMAT", "2")
    files.append(panels.panels_file(folder, layers, gemm))
    assert len(set(files)) == 3


def test_layers_are_replaced_one_by_one(monkeypatch):
    """No two copies of a model are in memory."""
    shown = model().requires_grad_(False)
    alive = [weakref.ref(layer.weight) for layer in cpu_linear.plain_linears(shown).values()]
    seen = []
    pack = Gemm.pack
    monkeypatch.setattr(
        Gemm, "pack", lambda *given: (seen.append(sum(one() is not None for one in alive)), pack(*given))[1]
    )
    speed_up_linears(shown)
    assert seen == sorted(seen, reverse=True) and seen[0] == len(alive) and seen[-1] <= 2


def test_a_folder_with_a_dangling_link_is_no_error(folder, tmp_path):
    (folder / "consolidated.safetensors").symlink_to(tmp_path / "gone")
    told = keep(folder)
    assert len(told.notes) == 1 and told.started == []
    assert torch.equal(logits(model(), folder), logits(model()))


def test_a_leftover_does_not_take_the_room_for_good(folder, tmp_path, monkeypatch):
    keep(folder)
    (file,) = kept(tmp_path)
    file.unlink()
    left = file.with_name(f".{file.name}.{realm()}-999999999.unfinished")
    left.write_bytes(b"half")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0 if left.exists() else 10**12))
    assert keep(folder).notes == []
    assert not left.exists()


def test_small_models_leave_nothing_on_disk(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(panels, "KEPT_FROM", 10**9)
    assert keep(folder).started == []
    assert kept(tmp_path) == []


@pytest.mark.parametrize("trouble", ["no room", "a file in the way", "disk fills up"])
def test_where_nothing_can_be_kept_one_note_says_so_and_the_model_runs(folder, tmp_path, monkeypatch, trouble):
    if trouble == "no room":
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    elif trouble == "a file in the way":
        (tmp_path / "cache").write_text("")
    else:

        def full(descriptor):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
    told = keep(folder)
    (note,) = told.notes
    assert "`tiny` is prepared for this CPU at each start" in note and str(tmp_path / "cache" / "panels") in note
    assert list((tmp_path / "cache").rglob("*.bin*")) == []
    assert torch.equal(logits(model(), folder), logits(model()))


def test_memory_that_runs_out_while_panels_are_kept_is_a_note(folder, monkeypatch):
    def full(self, weight):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(Gemm, "pack", full)
        (note,) = keep(folder).notes
    assert "can't allocate memory" in note


def test_with_whole_weights_every_layer_has_its_weight(monkeypatch):
    monkeypatch.setattr(cpu_linear, "cpu_multiplies_16_bit", lambda: False)
    shown = model().requires_grad_(False)
    assert speed_up_linears(shown, whole_weights=True) == 2 * 7 + 1
    assert isinstance(shown.lm_head, WideningLinear) and shown.lm_head.weight.shape == (384, 32)


@pytest.mark.parametrize("multiplies", [True, False])
def test_layers_that_the_kernel_cannot_multiply_go_the_way_of_a_machine_without_it(monkeypatch, multiplies):
    if multiplies and not cpu_linear.packing_works():
        pytest.skip("this build or CPU has no packed bf16 kernel")
    monkeypatch.setattr(cpu_linear, "cpu_multiplies_16_bit", lambda: multiplies)
    layers = nn.Sequential(nn.Linear(6, 4).bfloat16(), nn.Linear(4, 4).half(), nn.Linear(4, 4).bfloat16())
    assert speed_up_linears(layers.requires_grad_(False)) == (2 if multiplies else 3)
    others = [PackedLinear, nn.Linear] if multiplies else [WideningLinear, WideningLinear]
    assert [type(layer) for layer in layers] == [*others, PanelLinear]


def test_an_input_of_another_dtype_is_refused_as_pytorch_refuses_it():
    layer = nn.Linear(4, 4).bfloat16()
    layers = nn.Sequential(layer).requires_grad_(False)
    others = (torch.ones(1, 4), torch.ones(1, 4, dtype=torch.bfloat16, device="meta"))
    with pytest.raises(RuntimeError):
        layers(others[0])
    speed_up_linears(layers)
    for input in others:
        with pytest.raises(RuntimeError, match="bf16 on the CPU"):
            layers(input)


def test_an_input_that_is_not_contiguous_is_read_in_its_order():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 5).bfloat16()).requires_grad_(False)
    input = torch.randn(3, 8, 2).bfloat16().transpose(1, 2)
    right = layers(input).float()
    speed_up_linears(layers)
    assert layers(input).shape == (3, 2, 5)
    assert (layers(input).float() - right).abs().max() < 0.02
