"""Train a GPT."""

from __future__ import annotations

import argparse

ABOUT = "train a GPT as a configuration says"


def arguments(parser: argparse.ArgumentParser) -> None:
    """A configuration, and what to change in it."""
    parser.add_argument("config", metavar="CONFIG.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")


def run(args: argparse.Namespace) -> int:
    """One process, or one for every rank."""
    from schedir.train import run

    return run(args.config, args.sets)
