"""The code that docs/differences.md shows under the documents' names runs."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs/differences.md"


def test_code_under_the_documents_names_runs(tiny_model, capsys):
    [code] = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    exec(compile(code, PAGE.name, "exec"), {"model": tiny_model()})
    assert capsys.readouterr().out == "0 1.0\n0 0 0 0\n"
