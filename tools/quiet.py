"""Hides the lines of the server's log on which no user can act. `make serve` uses it unless --log-level is given."""

from __future__ import annotations

import os
import re
from typing import IO

# Upstream's messages: what they are, and how the line begins (after the time stamp, if it has one).
HIDDEN = {
    "the dump of all arguments": r"server_args=",
    "warnings about hardware that this host does not have": (
        r".*: UserWarning: (Only CUDA, \w+ and \w+ support \w+|Triton is not supported on current platform)"
    ),
    "the note that `sglang serve` exists": (
        r".*: UserWarning: 'python -m sglang\.launch_server' is still supported|  Example: sglang serve "
    ),
    "the source line that Python prints after a warning": r"  (warnings\.warn\(|return await dependant\.call\()",
    "a deprecation that concerns upstream's HTTP server": r".*: FastAPIDeprecationWarning: ",
    "this tool's own requests until the server is ready": r'INFO: .* "GET /health HTTP/1\.1" 503 ',
    "the note that a draft block has another size than config.json says": r"DFLASH block size mismatch: ",
    "steps of the start that succeed or do not apply": (
        r"(Memory baseline taken|Init parallel |init_threads_binding: |init_cpu_threads_env and shared memory"
        r"|Cannot detect CUDA architecture|Fail to set RLIMIT_|kill_process_tree called: )"
    ),
    "models whose packages are not installed": r"Ignore import error when loading sglang\.srt\.models\.",
    "what Triton's bindings leak when a process ends": (
        r"nanobind: (leaked|this is likely caused)| - leaked \w+ | - \.\.\. skipped remainder"
        r"|See https://nanobind\.readthedocs\.io/\S*refleaks\.html"
    ),
    "what Python's resource tracker cleans up when a process ends": (
        r".*: UserWarning: resource_tracker: There appear to be"
    ),
}
PATTERN = re.compile(rf"(?:\[\d{{4}}-\d\d-\d\d [^\]]*\] )?(?:{'|'.join(HIDDEN.values())})")
END = re.compile(rb"[\r\n]+")


def is_hidden(line: bytes) -> bool:
    """Return whether `make serve` hides a line of the server's log."""
    return PATTERN.match(line.decode(errors="replace")) is not None


def relay(source: int, sink: IO[bytes]) -> int:
    """Copy a server's output without the hidden lines, until it ends.

    Args:
        source: a file descriptor.
        sink: where the output goes. A progress bar, which ends in a carriage return, goes there at once.

    Returns:
        How many lines were hidden.
    """
    hidden, rest = 0, b""
    while True:
        chunk = os.read(source, 1 << 16)
        rest += chunk or b"\n" * bool(rest)  # the last line may lack its end
        done = 0
        for end in END.finditer(rest):
            line, done = rest[done : end.end()], end.end()
            if is_hidden(line):
                hidden += 1
            else:
                sink.write(line)
        sink.flush()
        rest = rest[done:]
        if not chunk:
            return hidden
