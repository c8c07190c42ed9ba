"""The playground's page in Chromium: what its controls do, what it shows, and what it refuses.

Run it:  python -m pytest lab/playground/test_page.py          needs Chromium; without it most tests are skipped
"""
import json
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from lab.playground import __main__ as command
from lab.playground.browser import CHROMIUM, Browser
from lab.playground.pack import most_at_stake
from lab.truth.file import read_truth

PAGE = command.HERE / "playground.html"
TEXT = PAGE.read_text(encoding="utf-8")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome found")


@pytest.fixture(scope="module")
def truth():
    return read_truth(command.TRUTH / "ground_truth.npz")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """The size of a phone. Long tasks of the page's own thread are noted in `blocked` (ms)."""
    with Browser(tmp_path_factory.mktemp("profile"), 390, 844) as browser:
        browser.call("Page.enable")
        browser.call("Page.addScriptToEvaluateOnNewDocument", source="""
            window.blocked = [];
            new PerformanceObserver(list => blocked.push(...list.getEntries().map(entry => entry.duration)))
              .observe({type: "longtask"});""")
        yield browser


@pytest.fixture
def page(browser):
    """A page that was just opened, with its first responses and scores."""
    return opened(browser)


def opened(browser, link=""):
    browser.open("about:blank")
    browser.open(PAGE.as_uri() + link)
    browser.until('document.querySelector(".token b") && $("scores").children.length && responses.rows.length')
    return browser


def set_control(page, name, value):
    """Change a control as a user does."""
    page.run(f'$("{name}").value = {json.dumps(value)}, $("{name}").dispatchEvent(new Event("input"))')


def settled(page, condition="true"):
    """Wait for the worker's answers to all that was asked."""
    page.run('ask("sample", {numbers: "", target: ""})')  # refused, after everything before it
    page.until('$("error").textContent.endsWith("this one has 0")')
    page.until(condition)


def test_the_file_is_what_the_command_writes():
    """Guards against a published page that is older than its sources, and one that a phone takes long to load."""
    assert TEXT == command.build(command.MODEL, command.TRUTH), "run python -m lab.playground"
    assert len(TEXT.encode()) < 1_800_000


def test_nothing_is_fetched():
    """Guards against a network: no address, no import, and a policy that admits none."""
    policy, found, reader = re.search('content="(default-src[^"]*)"', TEXT)[1], [], HTMLParser()
    reader.handle_starttag = lambda tag, attributes: found.extend(name for name, _ in attributes)
    reader.feed(TEXT)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' blob:; worker-src blob:"
    assert not {"src", "href", "action", "style"} & set(found)
    assert not re.search(r"url\(|@import|\bfetch\b|XMLHttp|WebSocket|innerHTML|\beval\(|new Function", TEXT)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_on_every_shade(scheme):
    """Guards against letters that drown in a strong colour: WCAG AA asks for a contrast of 4.5."""
    def luminance(c):
        return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) @ (0.2126, 0.7152, 0.0722)

    found = re.findall(r"--(\w+): (#\w{6});", TEXT)
    half = found[:8] if scheme == "light" else found[8:]
    colours = {name: np.array(to_rgb(code)) for name, code in half}
    for name in ("plus", "minus"):
        for share in np.linspace(0, 1, 21):
            shade = colours["paper"] + share * (colours[name] - colours["paper"])
            dark, light = sorted((luminance(shade), luminance(colours["ink"])))
            assert (light + 0.05) / (dark + 0.05) > 4.5, (name, share)


@needs_chromium
def test_recorded_responses_have_their_truth(page, truth):
    """Guards against A*, credit or text of another token."""
    group = most_at_stake(truth)
    rows = truth["group"] == group
    assert page.run('$("numbers").value + " → " + $("target").value') == re.sub(
        r"[][]", "", truth["prompts"][truth["response"][rows][0]]).replace("->", "→")
    shown = page.run("""responses.rows.map(row =>
      [row.tokens.map(t => t.text), row.tokens.map(t => t.aStar), row.credit])""")
    expected = [["".join(truth["piece"][at]), truth["a_star"][at], truth["advantage"][at[0]]]
                for r in np.unique(truth["response"][rows]) for at in [np.flatnonzero(truth["response"] == r)]]
    assert sorted("".join(text) for text, _, _ in shown) == sorted(text for text, _, _ in expected)
    for text, a_star, credit in shown:
        _, known, advantage = next(e for e in expected if e[0] == "".join(text))
        assert a_star == pytest.approx(known, abs=1e-6) and credit == pytest.approx([advantage] * len(text), abs=1e-4)
    sizes = page.run("""[...document.querySelectorAll(".token b")].map(
      b => parseInt(b.style.getPropertyValue("--size")))""")
    assert sizes == [round(100 * min(1, abs(x) / 0.4)) for _, a_star, _ in shown for x in a_star]


@needs_chromium
def test_the_first_minute(page):
    """Guards against a step that shows something else than it says, and an end that leaves the guide."""
    assert page.run('$("next").textContent').startswith("1 of 5")
    seen = []
    for _ in range(5):
        page.run('$("next").click()')
        settled(page)
        seen.append(page.run('[$("rule").value, $("band").value, $("told").textContent]'))
    assert [step[:2] for step in seen] == [["none", "credit"], ["none", "gradient"], ["none", "gradient"],
                                           ["token_type", "credit"], ["own", "credit"]]
    i, t = page.run("responses.at")
    largest = page.run("Math.max(...responses.rows.flatMap(row => row.tokens.map(t => Math.abs(t.aStar))))")
    assert abs(page.run(f"responses.rows[{i}].tokens[{t}].aStar")) == pytest.approx(largest, abs=0.25)
    page.run('$("next").click()')
    assert page.run('$("guide").hidden')


@needs_chromium
def test_rules_are_scored_while_they_are_typed(page):
    """Guards against scores and colours that stay when the rule changes, and a bad rule that goes unsaid."""
    set_control(page, "rule", "token_type")
    settled(page)
    half = page.run('document.querySelector("tr.own").textContent')
    set_control(page, "amount", "0.1")
    settled(page, f'document.querySelector("tr.own").textContent !== {json.dumps(half)}')
    set_control(page, "rule", "own")
    set_control(page, "line", "filler")
    settled(page)
    credit = page.run("responses.rows[0].tokens.map((token, t) => [token.role, responses.rows[0].credit[t]])")
    assert all((c != 0) == (role == 0) for role, c in credit)
    set_control(page, "line", "filler *")
    page.until('$("error").textContent === "the rule ends too early"')
    set_control(page, "line", "H")
    page.until('$("error").textContent === ""')


@needs_chromium
def test_sample_update_and_train(page):
    """Guards against tokens that don't grow, a step that changes nothing, and a curve that stands still."""
    page.run("""const begin = responses.begin;
      responses.begin = function (count) { window.began = count; begin.call(this, count); }; 0""")
    page.run('$("sample").click()')
    page.until("window.began === 8 && responses.rows.length && responses.rows[0].tokens[0].aStar === undefined")
    texts = page.run('[...document.querySelectorAll(".tokens")].map(box => box.textContent)')
    assert texts == page.run('responses.rows.map(row => row.tokens.map(t => visible(t.text)).join(""))')
    page.run("choose(0, 0)")
    page.until('$("others").textContent.includes("%")')
    page.run('$("measure").click()')
    page.until('$("facts").textContent.includes("64 continuations")')
    page.run('$("update").click()')
    page.until('$("status").textContent.startsWith("step 1 taken")')
    moved = page.run("responses.rows.flatMap(row => row.tokens.map((t, i) => row.credit[i] * (t.after - t.p)))")
    assert sum(moved) > 0 or not any(moved)
    page.run('$("update").click()')
    page.until('$("error").textContent.includes("sample new ones")')
    page.run('$("train").click()')
    page.until("curve.at(-1).steps >= 3", 120)
    page.run('$("train").click()')
    steps = page.run("curve.at(-1).steps")
    settled(page)
    assert steps <= page.run("curve.at(-1).steps") <= steps + 1
    assert f"steps={page.run('curve.at(-1).steps')}" in page.run("location.hash")
    page.run('$("reset").click()')
    page.until("curve.length === 1 && responses.rows[0].tokens[0].aStar !== undefined", 120)


@needs_chromium
def test_a_link_holds_the_state(browser):
    """Guards against a link that opens another puzzle, rule or seed, and a made-up one that breaks the page."""
    link = "#numbers=2,+3,+7&target=42&rule=own&line=H*p&seed=5&advantage=rloo&steps=2&amount=0.3"
    page = opened(browser, link)
    page.until('$("status").textContent.includes("the link was at step 2")', 120)
    assert page.run('FIELDS.map(id => $(id).value)') == ["rloo", "own", "0.3", "H*p", "credit", "5"]
    assert page.run('[$("numbers").value, $("target").value, $("guide").hidden]') == ["2, 3, 7", "42", True]
    page.run('$("train").click()')
    page.until('$("train").textContent === "train" && curve.at(-1).steps === 2', 120)
    hostile = "#numbers=<img src=x onerror=alert(1)>&rule=constructor&band=x&seed=1e99&steps=-1&line=<b>"
    browser.open("about:blank")
    browser.open(PAGE.as_uri() + hostile)
    browser.until('$("error").textContent.match("a puzzle has 2 to 4 numbers|whole ones")')
    assert browser.run('[$("rule").value, $("band").value]') == ["none", "credit"]
    assert browser.run('document.querySelectorAll("img").length') == 0


@needs_chromium
def test_keyboard_names_and_widths(page):
    """Guards against a page that needs a mouse, controls without a name, a width beyond the phone's, small targets."""
    page.run('document.querySelector(".token").focus()')
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        page.run(f'document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {{key: "{key}", bubbles: true}}))')
    assert page.run("document.activeElement === responses.buttons[0][1]")
    page.run("document.activeElement.click()")
    assert page.run('responses.at.join() === "0,1" && !$("panel").hidden')
    assert page.run('document.querySelector(".token").getAttribute("aria-label")').count(",") == 2
    unnamed = page.run("""[...document.querySelectorAll("input, select, button")].filter(e => e.offsetParent &&
      !(e.labels?.length || e.textContent.trim() || e.getAttribute("aria-label"))).map(e => e.id)""")
    small = page.run("""[...document.querySelectorAll("button:not(.token), select, input")].filter(
      e => e.offsetParent && e.getBoundingClientRect().height < 40).map(e => e.id)""")
    assert unnamed == [] and small == []
    assert page.run("document.documentElement.scrollWidth") <= 390


@needs_chromium
def test_the_page_is_not_blocked(browser):
    """Guards against work on the page's own thread; half a second, because processors of tests are busy and slow."""
    page = opened(browser)
    for rule in ("entropy_ratio", "own"):
        set_control(page, "rule", rule)
    page.run('$("sample").click()')
    settled(page)
    assert max(page.run("blocked"), default=0) < 500


@pytest.mark.parametrize("flags, message", [
    (["--truth", "nowhere"], "nowhere"), (["--model", "models/math-tiny"], "math-tiny|another model"),
    (["--tru"], "unrecognized|required|--tru")])
def test_bad_flags_are_one_clear_error(flags, message, monkeypatch, tmp_path, capsys):
    """Guards against a traceback, and a page whose truth is about another model."""
    monkeypatch.setattr(sys, "argv", ["lab.playground", *flags, "--out", str(tmp_path / "page.html")])
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert re.search(message, f"{stopped.value} {capsys.readouterr().err}") and not (tmp_path / "page.html").exists()
