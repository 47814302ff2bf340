"""Commands as the library makes them, with a `--help` that fits any width and errors of one line.

Owns the layout of `--help` (options in their panels, names whole, examples), and how what a command raised
becomes a line on stderr and an exit code. What the lines say is the errors' own.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
import traceback
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from stoker.cli.exits import ExitCode
from stoker.cli.session import CONTROLS, text_of
from stoker.errors import StokerError
from stoker.wording import wrong_value_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CONTEXT_SETTINGS = {"help_option_names": ["--help", "-h"], "max_content_width": 100}
_PLACE = re.compile(r"^messages(\.\w+)+: ")
"""Where an error is in a body of HTTP, which a command line has not."""
_WIDEST_NAME = 30  # a wider option has its text on the next line
_NEAR = 0.7  # of difflib's 0 to 1: a slip of the fingers; at its 0.6 --lora is near --raw
_MOST_COMMANDS = 3
_WORDS = "stoker.words"  # key of a context's `meta`
_ARGUMENTS, _OPTIONS, _HELP = "Arguments", "Options", "Help"


class HelpfulCommand(TyperCommand):
    """A command whose `--help` shows its options by panel and its examples line by line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # the library keeps a copy of click's types
        """Read the words of the command line, and keep them: messages name an option as it was written."""
        ctx.meta[_WORDS] = tuple(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run it; an error over a field of the library names the option that sets it."""
        try:
            return super().invoke(ctx)
        except StokerError as error:
            for parameter in self.params:
                _name_as_written(error, parameter, _name_of(parameter, ctx))
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options."""
        _write_parameters(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - the library's signature
        """Write the examples as they are: a command that is wrapped cannot be copied."""
        _write_examples(self.epilog, formatter)


class HelpfulGroup(TyperGroup):
    """A group of commands that shows them by panel, and ends what one raised with a line and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words of the command line; none at all ask for the help."""
        return super().parse_args(ctx, args if args or ctx.resilient_parsing else ["--help"])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write options, then the commands, whose texts are not cut."""
        _write_parameters(self, ctx, formatter)
        panels: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            if not command.hidden:
                text = (command.help or "").partition("\n\n")[0]
                panels[command.rich_help_panel or "Commands"].append((name, " ".join(text.split())))
        widest = max(len(name) for rows in panels.values() for name, _ in rows)
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl([(f"{name:<{widest}}", text) for name, text in rows])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - the library's signature
        """Write the examples as they are."""
        _write_examples(self.epilog, formatter)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,  # noqa: FBT001 - likewise
        windows_expand_args: bool = True,  # noqa: FBT001 - likewise
        **extra: Any,
    ) -> Any:
        """Run what the command line asks for; in the library's standalone mode this ends the program."""
        how = {"windows_expand_args": windows_expand_args, **extra}
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, **how)
        code = ExitCode.DONE
        with _ending_in_one_line():
            code = super().main(args, prog_name, complete_var, False, **how) or ExitCode.DONE
            sys.stdout.flush()
        sys.exit(code)


def _write_parameters(command: Any, ctx: Any, formatter: Any) -> None:
    panels: dict[str, list[tuple[str, str]]] = {_ARGUMENTS: [], _OPTIONS: []}
    last: list[tuple[str, str]] = []
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None:
            if parameter.param_type_name == "argument":
                panels[_ARGUMENTS].append((parameter.display_name_raw, record[1]))
            elif parameter.is_eager:
                last.append(record)
            else:
                panels.setdefault(parameter.rich_help_panel or _OPTIONS, []).append(record)
    panels[_HELP] = last
    for panel, rows in panels.items():
        if rows:
            with formatter.section(panel):
                formatter.write_dl(rows, col_max=_WIDEST_NAME)


def _write_examples(examples: str | None, formatter: Any) -> None:
    if examples:
        with formatter.section("Examples"):
            for line in examples.splitlines():
                formatter.write(f"  {line}\n")


def _name_as_written(error: StokerError, parameter: Any, written: str) -> None:
    """Put an option's written name where the message begins with its longest one or with the field.

    A key of a file, "slots in stoker.toml", stays what it is.
    """
    name, text = parameter.name or "", error.message
    if error.param == name and text.startswith(f"{name} in "):
        return
    if error.param == name and text.startswith(name):
        text = f"{written}{text.removeprefix(name)}"
    elif parameter.param_type_name == "option":
        longest = re.escape(max(parameter.opts, key=len))
        text = re.sub(rf"^{longest}(?![\w-])", written, text)
    error.message = text


@contextlib.contextmanager
def _ending_in_one_line() -> Iterator[None]:
    """What is raised inside ends the program with its exit code, and with one line where there is a fault."""
    try:
        yield
    except (TyperException, StokerError) as error:
        sys.exit(_fault(_text_of(error)))
    except typer.Abort:
        sys.exit(ExitCode.NO)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        _reader_left()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # where the library itself writes: --help
            _reader_left()
        raise
    except UnicodeError as error:
        sys.exit(_fault(f"what was given is not valid UTF-8: {error}"))
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        sys.exit(_fault(f"{error.strerror or error}{where}"))


def _text_of(error: TyperException | StokerError) -> str:
    if isinstance(error, StokerError):
        return " ".join(_PLACE.sub("", text_of(error)).split()).translate(CONTROLS)
    problems = getattr(error.__cause__, "errors", None)  # pydantic's, with which the library reads values
    if problems is not None and isinstance(error, typer.BadParameter):
        text = f"{_name_of(error.param, error.ctx)}: {wrong_value_text(problems()[0])}"
    else:
        text = _with_nearest(error)
        text = text[:1].lower() + text[1:]
    ctx = getattr(error, "ctx", None)
    return text if ctx is None else f"{text.rstrip('.')}; see {ctx.command_path} --help"


def _with_nearest(error: TyperException) -> str:
    """The library's message; of an unknown option with what is near it, else whose it is."""
    ctx: Any = getattr(error, "ctx", None)
    if ctx is None or not hasattr(error, "possibilities"):
        return error.format_message()
    option = str(getattr(error, "option_name", ""))
    text, wanted = f"no such option: {option}", option.lstrip("-")
    own = {name.lstrip("-"): name for each in ctx.command.get_params(ctx) for name in _names_of(each)}
    longer = [name for name in own if name.startswith(f"{wanted}-")]
    if near := longer or difflib.get_close_matches(wanted, own, n=1, cutoff=_NEAR):
        return f"{text}; did you mean {own[near[0]]}?"
    root = ctx.find_root()
    if owners := [f"`{name}`" for name in _commands_with(option, root.command, root)]:
        shown = ", ".join(owners) if len(owners) <= _MOST_COMMANDS else f"{owners[0]} and others"
        return f"{text}; it is of {shown}"
    return text


def _commands_with(option: str, command: Any, root: Any, path: str = "") -> Iterator[str]:
    """The commands, as they are called, that have an option of that name."""
    path = path or root.info_name
    if hasattr(command, "list_commands"):
        for name in command.list_commands(root):
            each = command.get_command(root, name)
            if not each.hidden:
                yield from _commands_with(option, each, root, f"{path} {name}")
    elif any(option in _names_of(parameter) for parameter in command.params):
        yield path


def _names_of(parameter: Any) -> list[str]:
    """Every name of an option; of an argument none."""
    is_option = parameter.param_type_name == "option"
    return [*parameter.opts, *parameter.secondary_opts] if is_option else []


def _name_of(parameter: Any, ctx: Any) -> str:
    """An option or argument, as it is written: on this command line, else in full."""
    names = _names_of(parameter)
    if not names:
        return str(parameter.display_name_raw)
    words: tuple[str, ...] = () if ctx is None else ctx.meta.get(_WORDS, ())
    options = words[: words.index("--")] if "--" in words else words
    heads = (word.partition("=")[0] if word.startswith("--") else word[:2] for word in options)
    written = [head for head in heads if head in names]
    return written[-1] if written else max(parameter.opts, key=len)


def _fault(text: str) -> ExitCode:
    from stoker.settings import is_debug

    if is_debug():
        typer.echo(traceback.format_exc(), err=True)
    typer.echo(f"stoker: {text}", err=True)
    return ExitCode.FAULT


def _reader_left() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not complain, and end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    sys.exit(ExitCode.READER_LEFT)
