"""Makes a process kill itself at a chosen moment."""

import fnmatch
import functools
import os
import signal


def arm(point: str) -> None:
    """Make this process kill itself at a point FUNCTION,PATTERN,COUNT,SIDE.

    FUNCTION of os that makes or removes a file of that name, or append, which writes a line; how often it is passed
    before; before, after or in the middle of it.
    """
    function, pattern, count, side = point.split(",")
    left = int(count)

    def passes(path: object) -> bool:
        nonlocal left
        if not fnmatch.fnmatch(os.path.basename(os.fspath(path)), pattern):
            return False
        left -= 1
        return left < 0

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if function == "append":
        from tabicl_train.run.records import Records

        def append(self: Records, name: str, text: str, header: str = "", append=Records._append) -> None:
            if passes(name):
                append(self, name, text[: len(text) // 2], header)
                die()
            append(self, name, text, header)

        Records._append = append
        return
    call = getattr(os, function)

    @functools.wraps(call)
    def armed(*arguments, **options):
        path = arguments[1] if function == "replace" else arguments[0]
        hit = passes(path)
        if hit and side == "before":
            die()
        result = call(*arguments, **options)
        if hit:
            die()
        return result

    setattr(os, function, armed)
