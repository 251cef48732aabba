"""The command line on scripted events instead of models.

In this process: the fixture-like `Fly`. As a process of its own, for signals and pipes:

    python cli_helpers.py SCENE generate hi         # SCENE is the name of a function here
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TextIO

import pytest
from event_helpers import Block, plain, run

from fly_cli.events import Event
from fly_cli.prompts import Prompt
from fly_cli.settings import DecodeSettings, ModelSettings, TextSettings

DRAFTED_RUN = run("==x======", Block("=!=", ["a ", "b ", "c "]), first="First ")
VERSIONS = {"fly": "0", "torch": "0", "transformers": "0", "python": "0"}


@dataclass
class FakePair:
    """What the command line asks of a pair."""

    settings: ModelSettings

    @property
    def codec(self) -> Any:
        return SimpleNamespace(encode=lambda prompt: SimpleNamespace(template_source="chat_template.jinja"))

    def sizes(self) -> str:
        return "1.0 MB of `a/target`"

    def describe(self) -> dict[str, Any]:
        place = {"model": "tiny", "dtype": "float32", "weight_bytes": 12_000_000, "devices": {"cpu": 1}}
        return {
            "models": self.settings.as_json(),
            "placement": [place],
            "stop_ids": [2],
            "vocab_size": 384,
            "versions": VERSIONS,
        }

    def remember_costs(self) -> None:
        """Nothing was measured."""


@dataclass
class Calls:
    """What the command line asked for."""

    models: list[ModelSettings] = field(default_factory=list)
    text: list[TextSettings] = field(default_factory=list)
    modes: list[str] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    decode: list[DecodeSettings] = field(default_factory=list)
    record: list[bool] = field(default_factory=list)


Source = Callable[[Prompt], Iterable[Event]]


def fake_modules(events: Source, calls: Calls) -> dict[str, ModuleType]:
    """`fly_cli.models` and `fly_cli.decode` that load nothing and replay events."""
    models, decoding = ModuleType("fly_cli.models"), ModuleType("fly_cli.decode")

    def load_pair(models: ModelSettings, text: TextSettings, *, mode: str, catalog: Any, progress: Any) -> FakePair:
        calls.models.append(models)
        calls.text.append(text)
        calls.modes.append(mode)
        return FakePair(models)

    def decode(pair: Any, prompt: Prompt, settings: DecodeSettings, *, record: bool = False) -> Iterator[Event]:
        calls.prompts.append(prompt)
        calls.decode.append(settings)
        calls.record.append(record)
        yield from events(prompt)

    models.load_pair = load_pair  # type: ignore[attr-defined]
    decoding.decode = decode  # type: ignore[attr-defined]
    return {"fly_cli.models": models, "fly_cli.decode": decoding}


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


class Fly:
    """Runs commands in this process, on scripted events."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: Path, *, scripted: bool = True
    ) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys
        self.calls = Calls()
        self.piped: TextIO | None = None
        monkeypatch.setattr("fly_cli.cli.common.default_config_file", lambda: home / "config.yaml")
        for name in [name for name in os.environ if name.startswith("FLY_")]:
            monkeypatch.delenv(name)
        self.stdin()
        if scripted:
            self.answers(lambda prompt: DRAFTED_RUN)

    def answers(self, events: Source) -> None:
        for name, module in fake_modules(events, self.calls).items():
            self.monkeypatch.setitem(sys.modules, name, module)

    def stdin(self, content: bytes | None = None, tmp_path: Path | None = None) -> None:
        path = Path(os.devnull)
        if content is not None and tmp_path is not None:
            path = tmp_path / "stdin"
            path.write_bytes(content)
        self.close()
        self.piped = path.open(encoding="utf-8", errors="surrogateescape")
        self.monkeypatch.setattr("sys.stdin", self.piped)

    def close(self) -> None:
        if self.piped is not None:
            self.piped.close()

    def __call__(self, *arguments: str) -> Outcome:
        from fly_cli.cli import main

        self.capsys.readouterr()
        code = main(arguments)
        out, err = self.capsys.readouterr()
        return Outcome(code, out, err)


# --- scenes of a process of its own ---------------------------------------------------------------------------------


def arrived() -> None:
    """Tell the test that the interesting place is reached."""
    Path(os.environ["MARKER"]).touch()


def rest() -> None:
    """Stay until something ends it."""
    arrived()
    while True:
        time.sleep(0.01)


def slow(events: Iterable[Event], pause: float = 0.02) -> Iterator[Event]:
    for number, event in enumerate(events):
        yield event
        if number == 4:
            arrived()
        time.sleep(pause)


def importing(prompt: Prompt) -> Iterator[Event]:
    """`fly_cli.models` takes for ever to import, and turns an interrupt into another error, as libraries do."""
    raise AssertionError


def loading(prompt: Prompt) -> Iterator[Event]:
    raise AssertionError


def swallowing(prompt: Prompt) -> Iterator[Event]:
    yield from plain(["one ", "two "])


def prefill(prompt: Prompt) -> Iterator[Event]:
    rest()
    yield from ()


def executing(prompt: Prompt) -> Iterator[Event]:
    exec("rest()")
    yield from ()


def streaming(prompt: Prompt) -> Iterator[Event]:
    yield from slow(plain(f"w{i} " for i in range(2000)))


def at_once(prompt: Prompt) -> Iterator[Event]:
    yield from plain(f"w{i} " for i in range(2000))


def paused(prompt: Prompt) -> Iterator[Event]:
    """Time enough for a signal to arrive."""
    arrived()
    time.sleep(0.5)
    yield from plain(["one ", "two "])


def second_waits(prompt: Prompt) -> Iterator[Event]:
    """The first prompt is answered at once, the second one never."""
    if prompt.text == "two":
        rest()
    yield from plain(["one ", "→"])


def drafted(prompt: Prompt) -> Iterator[Event]:
    yield from slow(run(*["==x======"] * 200))


def brisk(prompt: Prompt) -> Iterator[Event]:
    yield from slow(run(*["==x======"] * 25))


def holding(prompt: Prompt) -> Iterator[Event]:
    """What may become a stop string is held back when the run stands still."""
    yield from plain(["one ", "plea"], reason=None)[:1]
    yield run(Block("", [], final="pleas", held=5), first="one ")[2]
    rest()


def stubborn(prompt: Prompt) -> Iterator[Event]:
    """The first signal has to wait, as in a call that does not return to Python."""
    from fly_cli.cli.process import interruption

    with interruption.deferred():
        rest()
    yield from ()


def failing(prompt: Prompt) -> Iterator[Event]:
    secret = "hf_" + "secret"
    yield from plain(["one ", "two "], reason=None)
    raise RuntimeError(f"broken at length {len(secret)}")


def out_of_memory(prompt: Prompt) -> Iterator[Event]:
    yield from plain(["one ", "two "], reason=None)
    raise MemoryError


def unicode(prompt: Prompt) -> Iterator[Event]:
    yield from plain(["→ ", "😀", " 한"])


def echo(prompt: Prompt) -> Iterator[Event]:
    yield from plain([repr(prompt.text)])


class Stage(MetaPathFinder, Loader):
    """Gives the fake modules to whoever imports them, at the speed of the scene."""

    def __init__(self, scene: str) -> None:
        self.scene = scene
        self.modules = fake_modules(globals()[scene], Calls())

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in self.modules else None

    def exec_module(self, module: ModuleType) -> None:
        if self.scene == "importing":
            try:
                rest()
            except KeyboardInterrupt:
                raise ImportError("half a library") from None
        vars(module).update(vars(self.modules[module.__name__]))
        if self.scene == "loading" and module.__name__ == "fly_cli.models":
            module.load_pair = lambda *args, **kwargs: rest()  # type: ignore[attr-defined]
        if self.scene == "swallowing" and module.__name__ == "fly_cli.models":
            load = module.load_pair

            def load_pair(*args: Any, **kwargs: Any) -> Any:
                try:
                    rest()
                except KeyboardInterrupt:
                    return load(*args, **kwargs)

            module.load_pair = load_pair  # type: ignore[attr-defined]


def perform(scene: str, arguments: Sequence[str]) -> int:
    from fly_cli.cli import main

    sys.meta_path.insert(0, Stage(scene))
    sys.argv[1:] = arguments
    return main()


if __name__ == "__main__":
    sys.exit(perform(sys.argv[1], sys.argv[2:]))
