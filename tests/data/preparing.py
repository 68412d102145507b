"""A process that prepares a data=text cache: `python preparing.py CACHE CORPUS WORKERS [prepare]`.

It prints "preparing" when it begins, what is reported, and at the end the identity of the cache.
"""

from __future__ import annotations

import sys
from pathlib import Path

from small_cache import text_settings

from tiny_llm.config.errors import UserError
from tiny_llm.data.prepare import ensure_cache, prepare

if __name__ == "__main__":
    cache, corpus, workers = sys.argv[1:4]
    data = text_settings(
        Path(cache).parent, corpus, cache_dir=cache, prepare_workers=int(workers), shard_tokens=2000
    )
    print("preparing", flush=True)
    make = prepare if "prepare" in sys.argv[4:] else ensure_cache
    try:
        print(make(data, 0, lambda line: print(line, flush=True)).identity, flush=True)
    except UserError as error:
        print(f"error: {error}", flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
