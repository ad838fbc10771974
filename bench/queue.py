"""What Headrace's queue costs, beside plain Celery, on this machine: `python bench/queue.py --help`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    ROOT = Path(__file__).parents[1]
    sys.path[0] = str(ROOT)  # as a script this folder comes first, and `queue` would be this very file
    sys.path.insert(1, str(ROOT / "client"))

    from bench.queue_command import main

    main()
