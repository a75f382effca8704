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
