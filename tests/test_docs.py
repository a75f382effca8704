"""Links between the documents lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(document):
    targets = re.findall(r"\]\(([^)#\s]+)", document.read_text())
    broken = [target for target in targets if "://" not in target and not (document.parent / target).exists()]
    assert not broken


def test_the_tests_that_the_pitfalls_name_are_there():
    text = (ROOT / "docs/pitfalls.md").read_text().replace("`p/", "`tests/optim/test_pitfalls.py::")
    named, file = [], ""
    for path, function in re.findall(r"`(tests/\S+\.py|…)::(test_\w+)`", text):
        file = file if path == "…" else path
        named.append((file, function))
    assert len(named) > 70
    assert [name for path, name in named if not re.search(rf"def {name}\b", (ROOT / path).read_text())] == []
