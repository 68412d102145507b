"""What a user's mistake raises. The doors print it as one line on stderr and exit with code 2."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake that the user can mend: the message names the value, what is allowed and the way out."""


class ConfigError(UserError):
    """A wrong key, value or combination in the configuration."""


REFUSALS = {
    errno.ENOSPC: "the disk is full; free space",
    errno.EDQUOT: "the disk quota is used up; free space, or choose another place",
    errno.EACCES: "permission denied; choose another place, or ask its owner",
    errno.EPERM: "permission denied; choose another place, or ask its owner",
    errno.EROFS: "the disk is read-only; choose another place",
    errno.EIO: "the disk does not answer; choose another place",
    errno.ENOTDIR: "a part of it is a file, no directory; choose another place",
    errno.EEXIST: "it is a file, no directory; choose another place",
    errno.EISDIR: "it is a directory; name a file",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
}


def refusal(error: BaseException | None) -> tuple[OSError, str] | None:
    """Return what the system refused, with the reason and the way out; None for any other error.

    Libraries raise errors of their own while they handle the system's: those before `error` count, too.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in REFUSALS:
            return error, REFUSALS[error.errno]
        error = error.__context__
    return None


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Return `; did you mean 'X'?` for the allowed word nearest to `word`, or the empty string."""
    matches = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.5)
    return f"; did you mean '{matches[0]}'?" if matches else ""
