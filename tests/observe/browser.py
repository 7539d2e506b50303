"""A headless Chromium, which tests drive by its own protocol over pipes: no package is needed for it."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

#: Of the programs of Debian and others.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
#: Becomes a program that reads from file 3 and writes to file 4.
_WIRED = """
import fcntl, os, sys
for number, file in zip((3, 4), [fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3]]):
    os.dup2(file, number)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def program() -> str | None:
    """Return the path of a Chromium; CHROMIUM names another than that on the path. None if there is none."""
    named = os.environ.get("CHROMIUM")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of a Chromium."""

    def __init__(self, answers: IO[bytes], commands: IO[bytes]) -> None:
        self._read, self._write = answers, commands
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.complaints: list[str] = []  # errors and warnings of the console, and exceptions
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the answer to a command of the protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        self._write.write(json.dumps(message).encode() + b"\0")
        self._write.flush()
        while (found := self._next()).get("id") != number:
            self._hear(found)
        if "error" in found:
            raise RuntimeError(f"{method}: {found['error']}")
        return dict(found["result"])

    def _next(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._read.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("Chromium has ended")
            text += byte
        return dict(json.loads(text))

    def _hear(self, found: dict[str, Any]) -> None:
        method, about = found.get("method"), found.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(about["exceptionDetails"])[:600])
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(about["args"])[:600])
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.complaints.append(about["entry"]["text"])

    def size(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Set the width and height of the page, and whether the reader prefers dark pages."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 700,
        )  # fmt: skip
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def go(self, url: str) -> None:
        """Load a page."""
        self.send("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Return what an expression of JavaScript comes to, a promise's value for a promise."""
        found = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"])[:600])
        return found["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 30.0) -> Any:
        """Return the value of an expression as soon as it is true."""
        until = time.monotonic() + seconds
        while not (found := self.value(expression)):
            if time.monotonic() > until:
                text = self.value("document.body?.innerText.slice(0, 600)")
                raise AssertionError(f"{expression} is not true: {text} {self.complaints}")
            self.value("new Promise((done) => setTimeout(done, 50))")
        return found

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write a picture of the page; of all of it, or what is in sight."""
        found = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Run a Chromium for the length of a block."""
    path = program()
    assert path is not None
    to_read, from_write = os.pipe()
    from_read, to_write = os.pipe()
    # its helpers may still write while the folder is removed
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        wired = [sys.executable, "-S", "-c", _WIRED, str(to_read), str(to_write), path]
        process = subprocess.Popen(
            [*wired, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars",
             f"--user-data-dir={folder}", "--disable-background-networking", "--no-first-run"],
            pass_fds=(to_read, to_write), stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        for each in (to_read, to_write):
            os.close(each)
        with os.fdopen(from_read, "rb") as answers, os.fdopen(from_write, "wb") as commands:
            try:
                yield Browser(answers, commands)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # the browser's helpers, too
                process.wait()
