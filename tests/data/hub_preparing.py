"""A process that prepares a Hub corpus: `python hub_preparing.py SETTINGS_JSON TOKENS`.

HF_ENDPOINT has to be set before the hub library is imported: each test of the Hub needs its own process.
"""

from __future__ import annotations

import json
import sys
import time

from tiny_llm.config.errors import UserError
from tiny_llm.config.schema import HubCorpus, TextCorpus
from tiny_llm.data.prepare import ensure_cache

sleep = time.sleep

if __name__ == "__main__":
    time.sleep = lambda seconds: sleep(min(seconds, 0.02))  # back-off here, and in the libraries
    settings = json.loads(sys.argv[1])
    kind = TextCorpus if settings["name"] == "text" else HubCorpus
    settings["paths"] = tuple(settings["paths"]) if kind is TextCorpus else None
    data = kind(**{key: value for key, value in settings.items() if value is not None or key != "paths"})
    try:
        ensure_cache(data, int(sys.argv[2]), lambda line: print(line, flush=True))
    except UserError as error:
        print(f"error: {error}")
        sys.exit(2)
