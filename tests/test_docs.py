"""Pages that are written from code are current, and links of all pages lead somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import write_configuration_docs  # noqa: E402

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_page_of_all_settings_is_current() -> None:
    assert write_configuration_docs.PAGE.read_text() == write_configuration_docs.page()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    broken = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not broken


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert [page.name for page in PAGES[2:] if page.name != "README.md" and page.name not in index] == []
