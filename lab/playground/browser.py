"""A headless Chromium, driven through its debugging pipe with the standard library: for the tests of the page.

It finds Debian's chromium; where none is, CHROMIUM is None and the tests that need it are skipped.
"""
import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless=new --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-sync --disable-quic "
         "--disable-background-networking --disable-component-update --remote-debugging-pipe about:blank").split()


class Browser:
    """A browser with one page. `folder` holds its profile; use it in a `with` block."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 900) -> None:
        reads, self.write_end = os.pipe()
        self.read_end, writes = os.pipe()
        pipes = f"exec \"$@\" 3<&{reads} 4>&{writes}"  # the browser reads commands from 3 and answers on 4
        self.process = subprocess.Popen(["bash", "-c", pipes, "browser", CHROMIUM, f"--user-data-dir={folder}", *FLAGS],
                                        pass_fds=(reads, writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(reads)
        os.close(writes)
        self.buffer, self.count, self.session = b"", 0, None
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 500)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.write_end)
        os.close(self.read_end)

    def call(self, method: str, **parameters: Any) -> dict:
        """The result of one command of the DevTools protocol."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.buffer:
                if not (read := os.read(self.read_end, 1 << 20)):
                    raise RuntimeError("the browser closed")
                self.buffer += read
            answer, _, self.buffer = self.buffer.partition(b"\0")
            if (found := json.loads(answer)).get("id") == self.count:
                if "error" in found:
                    raise RuntimeError(found["error"]["message"])
                return found["result"]

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression on the page, once it is settled."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description", script))
        return found["result"].get("value")

    def open(self, address: str) -> None:
        """Go to an address and wait until the page's scripts ran."""
        self.call("Page.navigate", url=address)
        self.run("new Promise(go => document.readyState === 'complete' ? go() : addEventListener('load', go))")

    def until(self, condition: str, seconds: float = 60) -> None:
        """Wait until a JavaScript expression is true; RuntimeError after some seconds."""
        self.run(f"""new Promise((go, no) => {{
            const started = Date.now(), look = () => ({condition}) ? go() :
              Date.now() - started < {1000 * seconds} ? setTimeout(look, 20) :
              no(new Error("waited too long for " + {json.dumps(condition)}));
            look();
        }})""")

    def screenshot(self, file: Path) -> None:
        """Write what the window shows."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
