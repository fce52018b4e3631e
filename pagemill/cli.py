"""The `pagemill` command. Modules of commands are imported when called, so that `--help` costs little."""

from __future__ import annotations

import importlib
import os
import sys

import click

from pagemill import __version__
from pagemill.errors import ConfigError, PagemillError

EXIT_FAILED = 1
EXIT_USAGE = 2

# name: (module that holds `command`, first line of help)
_COMMANDS = {
    "serve": ("serve", "Serve a model on this machine: router, scheduler, workers and Redis under one supervisor."),
    "router": ("service", "Run one router: HTTP and gRPC towards clients, text to tokens and back."),
    "scheduler": ("service", "Run one scheduler: block tables, prefix cache, continuous batching."),
    "worker": ("service", "Run one worker: weights, KV cache, kernels, sampling."),
    "chat": ("chat", "Talk with a served model in the terminal."),
    "complete": ("complete", "Continue one prompt and print the text as it comes."),
    "top": ("top", "Show live what a deployment does: routers, schedulers, workers."),
    "config": ("config", "Print the settings in force and where each came from."),
    "bench": ("bench", "Measure throughput, latency, a server under load, and the kernels."),
    "doctor": ("doctor", "Say what this machine has and what is missing."),
    "version": ("version", "Print the version."),
}


class LazyGroup(click.Group):
    """A group that knows the names of its commands and imports one when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"pagemill.commands.{_COMMANDS[cmd_name][0]}")
        command: click.Command = module.command(cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            import difflib

            close = difflib.get_close_matches(args[0], _COMMANDS, n=1)
            hint = f" Did you mean {close[0]}?" if close else f" Commands are: {', '.join(_COMMANDS)}."
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, help_line) in _COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="`pagemill serve` with nothing else serves the demo model on http://127.0.0.1:8000; "
    "`pagemill COMMAND --help` explains each command.",
)
@click.version_option(__version__, prog_name="pagemill", message="%(prog)s %(version)s")
def app() -> None:
    """Pagemill: a server for large language models."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point. Exits 0 on success, 1 where something failed, 2 where the command line or a setting is wrong."""
    # Taken out of the environment: it is meant for this process, not for those that it starts.
    parent_pid = os.environ.pop("PAGEMILL_PARENT_PID", "")
    if parent_pid.isdecimal():
        from pagemill.process_guard import die_with_parent

        die_with_parent(int(parent_pid))
    try:
        code = app.main(args=arguments, prog_name="pagemill", standalone_mode=False)
    except click.exceptions.Exit as err:
        code = err.exit_code
    except click.ClickException as err:
        err.show()
        code = EXIT_USAGE
    except (KeyboardInterrupt, click.Abort):
        code = 130
    except PagemillError as err:
        print(f"pagemill: error: {err.message}", file=sys.stderr)
        code = EXIT_USAGE if isinstance(err, ConfigError) else EXIT_FAILED
    except BrokenPipeError:
        # The reader of a pipe went away; the interpreter's flush at exit would complain a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_FAILED
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
