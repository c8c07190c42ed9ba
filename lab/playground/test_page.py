"""The file of the playground, without a browser."""
import re
from html.parser import HTMLParser
from pathlib import Path

TEXT = Path(__file__).with_name("playground.html").read_text(encoding="utf-8")


def test_nothing_is_fetched_or_left_to_chance():
    """Guards against a network: no address, no import, a policy that admits none; and a page that loads for long."""
    assert len(TEXT.encode()) < 1_600_000
    policy, found, reader = re.search('content="(default-src[^"]*)"', TEXT)[1], [], HTMLParser()
    reader.handle_starttag = lambda tag, attributes: found.extend(name for name, _ in attributes)
    reader.feed(TEXT)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' blob:; worker-src blob:"
    assert not {"src", "href", "action", "style"} & set(found)
    assert not re.search(r"url\(|@import|\bfetch\b|XMLHttp|WebSocket|innerHTML|\beval\(|new Function|\.random", TEXT)
