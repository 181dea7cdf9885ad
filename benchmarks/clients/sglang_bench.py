"""sglang's bench_serving without the rest of sglang: runs in an environment where it is installed with --no-deps.

Importing the package would import its kernels. Its client needs only a few modules that do not, so the packages on the
way to them are put in place empty.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

PACKAGES = ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.disaggregation")


def main() -> None:
    """Hand the command line to the client."""
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:
        raise SystemExit("sglang is not installed here")
    root = Path(found.origin).parent
    for name in PACKAGES:
        module = types.ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module
    pairs = types.ModuleType("sglang.srt.disaggregation.utils")
    pairs.FAKE_BOOTSTRAP_HOST = "2.2.2.2"  # type: ignore[attr-defined]  only its name is imported
    sys.modules[pairs.__name__] = pairs
    from sglang.benchmark.serving import cli_main

    cli_main()


if __name__ == "__main__":
    main()
