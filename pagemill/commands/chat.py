"""`pagemill chat`: a conversation in the terminal, or one turn per line of a pipe."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import click

from pagemill.commands.endpoint import AskOptions, Message, ask_options, parse_ask_options
from pagemill.errors import PagemillError

_HELP = """Talk with a served model in the terminal.

The conversation is kept until /reset; /exit or Ctrl-D ends, Ctrl-C stops an answer, /help lists the commands. Where
stdin is a pipe, each line is one turn and only the answers are printed. Needs a running server, such as
`pagemill serve`."""

_COMMANDS = "/reset forgets the conversation, /exit ends it, /help shows this."
# A line of one such word is a command; "/etc/hosts is what?" is a turn.
_COMMAND = re.compile(r"/\w*")


def command(name: str) -> click.Command:
    return click.Command(
        name,
        callback=_chat,
        params=[
            click.Option(["--system"], default="", help="System message at the start of the conversation."),
            *ask_options(max_tokens=512),
        ],
        help=_HELP,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )


class Conversation:
    """Turns so far. A turn whose answer failed is taken back, so that the next one starts from a sound state."""

    def __init__(self, options: AskOptions, system: str) -> None:
        self._options = options
        self._system = system
        self._messages: list[Message] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def ask(self, text: str) -> Iterator[str]:
        """The answer, piece by piece. What came before an early end stays in the conversation.

        Raises:
            PagemillError: from the server; the turn is taken back.
        """
        messages: list[Message] = [*self._messages, {"role": "user", "content": text}]
        answer: list[str] = []
        try:
            for piece in self._options.endpoint.chat(messages, self._options.params):
                answer.append(piece)
                yield piece
        except PagemillError:
            answer.clear()
            raise
        finally:
            if answer:
                self._messages = [*messages, {"role": "assistant", "content": "".join(answer)}]


def _chat(system: str, **parameters: Any) -> None:
    options = parse_ask_options(parameters)
    options.endpoint.check()
    conversation = Conversation(options, system)
    if sys.stdin.isatty():
        _talk(conversation)
    else:
        for line in sys.stdin:
            text = line.strip()
            if text == "/exit":
                return
            if _is_turn(text, conversation):
                for piece in conversation.ask(text):
                    click.echo(piece, nl=False)
                click.echo()


def _is_turn(text: str, conversation: Conversation) -> bool:
    """Whether `text` is for the model. Carries out the other commands than /exit."""
    if text == "/reset":
        conversation.reset()
    elif text == "/help":
        click.echo(_COMMANDS, err=True)
    elif _COMMAND.fullmatch(text):
        click.echo("unknown command; /reset, /exit, /help", err=True)
    else:
        return bool(text)
    return False


def _talk(conversation: Conversation) -> None:
    from rich.console import Console

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives input() line editing and history

    console = Console(highlight=False)
    console.print(_COMMANDS, style="dim")
    while True:
        try:
            text = input("you> ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if text == "/exit":
            return
        if _is_turn(text, conversation):
            _answer(conversation, text, console)


def _answer(conversation: Conversation, text: str, console: Any) -> None:
    """Print one answer as it comes. Ctrl-C ends it, which aborts the request on the server."""
    pieces = conversation.ask(text)
    try:
        for piece in pieces:
            console.print(piece, end="", markup=False, style="cyan", soft_wrap=True)
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]
        console.print(" (stopped)", style="dim", end="")
    except PagemillError as err:
        console.print(f"error: {err.message}", style="red", markup=False, end="")
    console.print()
