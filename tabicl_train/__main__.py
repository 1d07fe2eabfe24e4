"""The command tabicl-train, which is also python -m tabicl_train."""

import signal


def train() -> None:
    """tabicl-train; imports take seconds, in which ctrl-C ends it without a stack trace."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tabicl_train.commands import train as run

    run()


if __name__ == "__main__":
    train()
