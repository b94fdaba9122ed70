"""The built libraries themselves."""

import subprocess
import sys
from pathlib import Path

import pytest
from ci_registration import register_cpu_ci
from sgl_kernel import ddtree

register_cpu_ci(est_time=5, suite="kernel")

LIBRARIES = sorted(Path(ddtree.__file__).parent.glob("_ddtree_*.so"))


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_exports_nothing(library):
    """Else a libstdc++ that the compiler links statically is mixed with torch's, and an op's first call crashes."""
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True
    )
    assert symbols.stdout == ""


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
