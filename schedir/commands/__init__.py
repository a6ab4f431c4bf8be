"""The commands: a module each, with what it is for, its arguments, and what it does.

    ABOUT: str                                        one line, for --help
    def arguments(parser: ArgumentParser) -> None     what it takes
    def run(args: Namespace) -> str | int             what it says at its end, or its exit code

and, where --help has more to tell,

    def more() -> str                                 what follows its options

The module's name is the command's, with a `_` where that is a word of Python.  Each imports what
it needs when it runs: --help must not wait for what it does not show.
"""
