"""Says whether DDTREE serves a target with a drafter, what it would choose, or why it refuses them.

    python -m sglang.srt.speculative.ddtree.check TARGET DRAFTER [arguments of launch_server]

TARGET and DRAFTER are folders, or repositories on the hub. Only their configurations are read, and the sizes of their
weights. The checks are those of the server: the arguments are resolved as launch_server does it. The exit status is 0 if
DDTREE serves them, 1 if it refuses them, and 2 if an argument is wrong. launch_server --check-drafter does the same.
"""

from __future__ import annotations

import sys
import warnings

USAGE = "usage: python -m sglang.srt.speculative.ddtree.check TARGET DRAFTER [arguments of launch_server]"


def main(argv: list[str]) -> int:
    """Print the verdict on the models that the command line names, and return the exit status."""
    if argv[:1] in (["-h"], ["--help"]):
        print(__doc__.strip())
        return 0
    if len(argv) < 2 or argv[0].startswith("-") or argv[1].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    # SGLang's modules warn while they are imported if the host has no GPU.
    warnings.simplefilter("ignore")
    from sglang.srt.speculative.ddtree.verdict import check

    target, drafter, *arguments = argv
    return check(target, drafter, arguments).show(target, drafter)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
