"""Put our modules and patches together with the pinned upstream release. Standard library only."""

import sys

# Before tomllib is imported; an older interpreter must be able to read this file.
if sys.version_info < (3, 11):  # noqa: UP036
    raise SystemExit(
        "sglang-ddtree needs Python 3.11 or newer (upstream ships wheels for no older one); this is Python "
        "%d.%d at %s: run a newer one, for example python3.11." % (*sys.version_info[:2], sys.executable)
    )
