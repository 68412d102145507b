"""What a user's mistake raises. The doors print it as one line on stderr and exit with code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake that the user can mend: the message names the value, what is allowed and the way out."""


class ConfigError(UserError):
    """A wrong key, value or combination in the configuration."""


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Return `; did you mean 'X'?` for the allowed word nearest to `word`, or the empty string."""
    matches = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.5)
    return f"; did you mean '{matches[0]}'?" if matches else ""
