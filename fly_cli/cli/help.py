"""Help texts: plain, in sections, and without the time that a richer layout takes to import."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class SectionedCommand(TyperCommand):
    """A command whose help has a section for each `rich_help_panel` of its parameters."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                other = "Arguments" if parameter.param_type_name == "argument" else "Other"
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or other, []).append(record)
        for name, records in sections.items():
            with formatter.section(name):
                formatter.write_dl(records)
