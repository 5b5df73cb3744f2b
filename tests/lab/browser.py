"""A headless Chromium, driven through its debugging pipe: messages of the DevTools protocol, each ended by a NUL."""

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any


class Browser:
    """One page of a Chromium of its own."""

    def __init__(self, profile: Path) -> None:
        theirs, self._to = os.pipe()
        self._from, ours = os.pipe()
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                 "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank")  # fmt: skip
        start = f'exec 8<&{theirs} 9>&{ours}; exec chromium "$@" 3<&8 4>&9 8<&- 9>&-'
        self._process = subprocess.Popen(
            ("bash", "-c", start, "chromium", *flags), pass_fds=(theirs, ours), stderr=subprocess.DEVNULL
        )
        os.close(theirs)
        os.close(ours)
        self._number, self._read, self._session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: object) -> dict[str, Any]:
        """The result of a method; events that arrive before it are kept."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": params, **session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "result" in found, found
                return dict(found["result"])
            self.events.append(found)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            piece = os.read(self._from, 1 << 20)
            assert piece, f"chromium has ended with exit code {self._process.wait(10)}"
            self._read += piece
        line, self._read = self._read.split(b"\0", 1)
        return dict(json.loads(line))

    def open(self, page: Path, *, width: int, dark: bool = False) -> None:
        """Load a page from the disk and wait for its `load` event."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        self.events.clear()
        self.ask("Page.navigate", url=page.as_uri())
        while not any(each["method"] == "Page.loadEventFired" for each in self.events):
            self.events.append(self._next())

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, text=key if len(key) == 1 else "")

    def picture(self, target: Path) -> None:
        """Write a PNG of the whole page."""
        shown = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        target.write_bytes(base64.b64decode(shown["data"]))

    def pdf(self, target: Path) -> None:
        target.write_bytes(base64.b64decode(self.ask("Page.printToPDF", printBackground=False)["data"]))

    def requests(self) -> list[str]:
        """The addresses that the page asked for since it was opened."""
        return [
            each["params"]["request"]["url"] for each in self.events if each["method"] == "Network.requestWillBeSent"
        ]

    def errors(self) -> list[str]:
        """What the page's console and its scripts reported."""
        names = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [json.dumps(each["params"]) for each in self.events if each["method"] in names]

    def close(self) -> None:
        os.close(self._to)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        os.close(self._from)
