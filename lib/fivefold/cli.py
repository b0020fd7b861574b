"""The `fivefold` command.

Exit codes: 0 all is well, 1 the answer is no, 2 the command could not do what it was asked, and one line says why.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

from fivefold import plan_command, train_command
from fivefold.runtime.errors import RunError

SPEAKS_LAST = 10  # seconds for rank 0 to say what is wrong: torchrun ends all ranks when the first one ends


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":  # under torchrun every rank has the same to say
            print(f"fivefold: {' '.join(str(error).split())}", file=sys.stderr)
        else:
            time.sleep(SPEAKS_LAST)
        return 2
    except RunError as error:
        print(f"fivefold: {error}", file=sys.stderr)
        return 2


def doctor(options: argparse.Namespace) -> int:
    from fivefold.doctor import examine, table

    findings = examine()
    print(table(findings))
    return int(any(finding.needed and not finding.works for finding in findings))


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, without the list of all options."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fivefold", description="A hands-on course in 5D parallelism.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(command=function)
        return sub

    command("doctor", doctor, "Say what this machine can do, and whether the course runs on it.")
    train = command("train", train_command.train, "Train the capstone model on a layout; also under torchrun.")
    train_command.add_options(train)
    plan = command("plan", plan_command.run, "Rank the layouts of a model on a cluster, and explain the best.")
    plan_command.add_options(plan)
    return parser


if __name__ == "__main__":
    sys.exit(main())
