"""The terms of the status page come from the glossary, each once."""

import re
from pathlib import Path

from anvil_mux.proxy import page
from anvil_mux.proxy.page import terms
from anvil_mux.scheduler.slot import TRANSITIONS

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = (page.FOLDER / "page.html").read_text()
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()


def test_a_term_means_what_its_row_says_and_so_does_each_of_several():
    assert terms()["lease"] == "one request's hold on a ready backend, from its admission to its last byte"
    assert terms()["sever"] == terms()["severed"]
    assert "`" not in "".join(terms().values())


def test_a_state_means_what_the_row_says_that_names_it():
    assert terms()["loading"] == terms()["load"]
    assert {start for start, _ in TRANSITIONS} | {*TRANSITIONS.values()} <= {*terms()}


def test_the_page_has_the_meaning_of_each_of_its_terms_once_and_no_other():
    _, body = page._page()
    shown = re.search(r'<dl id="terms" hidden>(.*?)</dl>', body.decode(), re.S)
    assert shown
    names = re.findall(r"<dt>(.*?)<dd>", shown[1])
    assert len(names) == len({*names}) > 40
    assert {"model", "first byte", "hold back", "stuck"} <= {*names}
    assert "redis" not in names
    assert page.TERMS in SOURCE
    assert page.TERMS not in body.decode()


def test_what_the_glossary_says_of_the_page_is_on_it():
    rows = re.findall(r"^\| ([^|]+) \|", GLOSSARY.partition("## On the status page")[2], re.M)
    written = {*re.findall(r'data-term="([^"]+)"', SOURCE)}
    written |= {
        term for several in re.findall(r'data-terms="([^"]+)"', SOURCE) for term in several.split(", ")
    }
    assert {*rows[1:]} <= written
