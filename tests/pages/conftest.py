"""Fixtures of tests of pages."""

import pytest

from tests.pages import browser as chromium


@pytest.fixture(scope="module")
def browser():
    chrome = chromium.start()
    yield chrome
    chrome.quit()
