"""What the README says works: its Python example runs, and its commands parse."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from fly_cli.cli.app import app
from fly_cli.models import load_pair
from fly_cli.settings import ModelSettings

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands():
    """Each `fly ...` of the shell blocks, as words, without redirections."""
    for line in "".join(blocks("sh")).splitlines():
        for part in re.split(r"&&|\||>", re.sub(r"\s#.*", "", line)):
            words = shlex.split(part)
            if words and words[0].endswith("fly"):
                yield words[1:]


def test_the_python_example_runs(tiny_pair_dirs, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("FLY_CACHE", str(tmp_path))  # no costs are known of other tests
    (example,) = blocks("python")
    target, draft = map(str, tiny_pair_dirs)
    monkeypatch.setattr("fly_cli.load_pair", lambda _: load_pair(ModelSettings(target=target, draft=draft)))
    exec(compile(example, "README.md", "exec"), {})
    assert "exact" in capsys.readouterr().out


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_the_commands_parse(words):
    group = typer.main.get_command(app)
    name, *arguments = words
    command = group.get_command(None, name)
    command.make_context(name, list(arguments))


def test_the_readme_has_commands_and_names_no_missing_file():
    assert len(list(commands())) >= 8
    for path in re.findall(r"\]\(([\w./-]+)\)", README):
        if not path.startswith("http"):
            assert (Path(__file__).parents[1] / path).exists(), path
