"""A headless Chromium over its debugging pipe; nothing but Python's own library."""
import base64
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time


def find():
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        path = shutil.which(name)
        if path:
            return path
    return None


class Browser:
    """One page. `errors` has what its scripts threw or the browser refused."""

    def __init__(self, width=1280, height=800, scale=1):
        self.profile = tempfile.mkdtemp(prefix="monitor_browser_")
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()

        def place():  # the browser reads from 3 and writes to 4
            low, high = os.dup(read_commands), os.dup(write_answers)
            os.dup2(low, 3)
            os.dup2(high, 4)

        self._process = subprocess.Popen(
            [find(), "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
             "--disable-dev-shm-usage", "--hide-scrollbars", "--user-data-dir=" + self.profile, "about:blank"],
            preexec_fn=place, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(read_commands)
        os.close(write_answers)
        self._number = 0
        self._results = {}
        self._changed = threading.Condition()
        self.errors = []
        threading.Thread(target=self._listen, daemon=True).start()
        target = self._send("Target.getTargets", session=None)["targetInfos"]
        page = next(each for each in target if each["type"] == "page")["targetId"]
        self._session = None
        self._session = self._send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._send(domain + ".enable")
        self.resize(width, height, scale)

    def _listen(self):
        rest = b""
        while True:
            piece = os.read(self._answers, 1 << 20)
            if not piece:
                return
            *whole, rest = (rest + piece).split(b"\0")
            for text in whole:
                message = json.loads(text)
                with self._changed:
                    if message.get("method") == "Runtime.exceptionThrown":
                        self.errors.append(json.dumps(message["params"]["exceptionDetails"])[:500])
                    if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                        self.errors.append(message["params"]["entry"]["text"])
                    if "id" in message:
                        self._results[message["id"]] = message
                        self._changed.notify_all()

    def _send(self, method, session="own", timeout=60, **params):
        self._number += 1
        number = self._number
        command = {"id": number, "method": method, "params": params}
        if session == "own" and getattr(self, "_session", None):
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        with self._changed:
            if not self._changed.wait_for(lambda: number in self._results, timeout):
                raise TimeoutError(method)
            answer = self._results.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def resize(self, width, height, scale=1):
        self._send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale,
                   mobile=width < 600)

    def scheme(self, name):
        self._send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def open(self, address):
        self._send("Page.navigate", url=address)

    def run(self, script):
        """The value of an expression; promises are waited for."""
        answer = self._send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:500])
        return answer["result"].get("value")

    def until(self, script, timeout=30):
        """Waits until an expression is true; it may throw while the page loads."""
        end = time.monotonic() + timeout
        while not self.run("(() => { try { return " + script + "; } catch { return false; } })()"):
            if time.monotonic() > end:
                raise AssertionError(f"never true: {script}\n{self.run('document.body.innerText')}\n{self.errors}")
            time.sleep(0.05)

    def key(self, name):
        text = name if len(name) == 1 else ""
        for kind in ("keyDown", "keyUp"):
            self._send("Input.dispatchKeyEvent", type=kind, key=name, text=text if kind == "keyDown" else "")

    def mouse(self, kind, x, y, button="none"):
        self._send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1,
                   buttons=1 if button == "left" else 0)

    def screenshot(self, path, full=True):
        shot = self._send("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        with open(path, "wb") as file:
            file.write(base64.b64decode(shot["data"]))

    def close(self):
        self._process.terminate()
        self._process.wait()
        shutil.rmtree(self.profile, ignore_errors=True)
