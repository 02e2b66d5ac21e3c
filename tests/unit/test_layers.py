from pathlib import Path

import pytest

import schedtrace

PYPROJECT = Path(schedtrace.__file__).parent.parent / "pyproject.toml"


@pytest.mark.skipif(not PYPROJECT.exists(), reason="not in a checkout")
def test_imports_go_downward_only(capsys):
    pytest.importorskip("importlinter")
    from importlinter.cli import lint_imports

    status = lint_imports(config_filename=str(PYPROJECT), no_cache=True)
    assert status == 0, capsys.readouterr().out
