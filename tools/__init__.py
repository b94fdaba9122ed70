"""Puts our modules and patches together with the pinned upstream release. Uses the standard library only."""

import sys

# Before anything imports tomllib. An older interpreter must be able to parse this file: no f-strings.
if sys.version_info < (3, 11):  # noqa: UP036
    raise SystemExit(
        "sglang-ddtree needs Python 3.11 or newer (upstream publishes no wheels for older versions). This is Python "
        "{}.{} at {}. Run a newer one, for example python3.11.".format(*sys.version_info[:2], sys.executable)
    )
