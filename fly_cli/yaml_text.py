"""YAML as settings are written in it: plain values, every key once.

A list or table that is named (`&name`) and used again (`*name`) is refused: a page of these can stand for more values
than fit in memory, or for one that holds itself.
"""

from __future__ import annotations

from typing import Any

import yaml
from yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode

from .errors import SettingsError
from .json_text import MAX_INTEGER

MOST_NESTED = 50  # lists and tables in each other


def read_yaml(text: str, name: str) -> Any:
    """The value of a text; `name` is what messages call it. Raises `SettingsError` with the line and the reason."""
    loader: Loader | None = None
    try:
        loader = Loader(text)
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SettingsError(
            f"{name}{line} is not YAML: {error.problem or error.context}", hint="correct that line"
        ) from None
    except yaml.YAMLError as error:
        raise SettingsError(
            f"{name} is not YAML: {' '.join(str(error).split())}", hint="save it as UTF-8 text"
        ) from None
    finally:
        if loader is not None:
            loader.dispose()


class Loader(yaml.SafeLoader):
    """PyYAML's loader of plain values, less what settings have no use for."""

    depth = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        start = event.start_mark
        if isinstance(event, yaml.AliasEvent) and isinstance(self.anchors.get(event.anchor), CollectionNode):
            raise yaml.composer.ComposerError(problem="a list or table is used again; write it out", problem_mark=start)
        if self.depth > MOST_NESTED:
            raise yaml.composer.ComposerError(problem="nested too deeply", problem_mark=start)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(node, MappingNode):
            refuse_twice(node)
        return node

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception as error:  # such as a date without a 31st: each kind of value has its own way to fail
            raise not_a_value(node) from error
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise not_a_value(node)
        return value


def refuse_twice(table: MappingNode) -> None:
    """Raise for a key that a table has twice: one of the two values would be lost without a word."""
    seen: set[str] = set()
    for key, _ in table.value:
        if isinstance(key, ScalarNode):
            if key.value in seen:
                raise yaml.composer.ComposerError(
                    problem=f"`{key.value:.40}` is there twice", problem_mark=key.start_mark
                )
            seen.add(key.value)


def not_a_value(node: Node) -> yaml.constructor.ConstructorError:
    kind = node.tag.rpartition(":")[2]
    return yaml.constructor.ConstructorError(problem=f"{kind} that is none, or too large", problem_mark=node.start_mark)
