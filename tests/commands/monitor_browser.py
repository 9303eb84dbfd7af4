"""`accelerate monitor` in a real browser: monitor_browser.py ACCELERATE [--pictures FOLDER].

Ends with 77, which CTest shows as skipped, where there is no Chromium.
"""
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from browser import Browser, find

ACCELERATE = sys.argv[1]
PICTURES = sys.argv[sys.argv.index("--pictures") + 1] if "--pictures" in sys.argv else None
EVIL = "<img src=x onerror=\"window.evil=1\">"


def write_run(folder, name, ranks=4, steps=6000, rate=1.2e-3, start=0.0, straggler=None, end="finished", seed=0):
    """A run with a loss that falls, and a rank that becomes slow."""
    os.makedirs(folder, exist_ok=True)
    for rank in range(ranks):
        draw = random.Random(seed * 100 + rank)
        with open(f"{folder}/rank_{rank}.jsonl", "w", encoding="utf-8") as file:
            def write(entry, out=file):
                out.write(json.dumps(entry) + "\n")

            write({"time": start, "start": {"rank": rank, "world": ranks, "host": f"node{rank // 2}",
                                            "device": f"cuda:{rank % 2}", "program": "train"}})
            if rank == 0:
                write({"time": start, "name": name, "config": {"learning_rate": rate, "batch_size": 64, "epochs": 3}})
            now = start
            for step in range(1, steps + 1):
                late = straggler is not None and step > 0.4 * steps
                taken = 14 + 2 * draw.random() + (3 if step % 400 < 6 else 0) + (4.3 if late else 0)
                now += taken / 1000
                if rank == 0:
                    fall = math.exp(-4 * step * rate)
                    values = {"train/loss": 2.3 * fall + 0.25 + draw.gauss(0, 0.05) * (1 + 2 * fall)}
                    if step % 20 == 0:
                        values["eval/accuracy"] = 0.92 - 0.8 * math.exp(-3 * step * rate) + draw.gauss(0, 0.006)
                        values["grad_norm"] = abs(draw.gauss(1.2, 0.25)) + 2 * fall
                    write({"time": now, "step": step, "values": values})
                if step % 10 == 0:
                    wait = (1.1 if rank == straggler else 5.6) if late else 1.2
                    write({"time": now, "steps": step, "count": 10, "ms": taken, "max": taken + 6,
                           "wait": wait + 0.5 * draw.random(), "samples": 256,
                           "lr": rate * min(1, step / 300) * 0.5 * (1 + math.cos(math.pi * step / steps))})
                if step % 60 == 0:
                    busy = draw.gauss(93, 2) - (18 if late and rank != straggler else 0)
                    write({"time": now, "memory": int(1.9e9 + 2e8 * (1 - math.exp(-step / 900)) + rank * 3e7),
                           "gpu": {"used": int(41e9 + rank * 4e8), "total": int(80e9), "busy": int(min(100, busy))}})
            if end:
                write({"time": now, "end": end})


def write_checkpoint(folder, saved_at, size):
    os.makedirs(folder)
    with open(f"{folder}/model.safetensors", "wb") as file:
        file.truncate(size)
    with open(f"{folder}/accelerate_state.json", "w", encoding="utf-8") as file:
        json.dump({"format": "accelerate-checkpoint", "format_version": 1, "accelerate_version": "0.1.0",
                   "torch_version": "2.11.0", "saved_at": saved_at, "num_processes": 4, "iteration": 0, "step": 0,
                   "files": [{"name": "model.safetensors", "size": 86_000_000, "xxh3": "0" * 16}]}, file)


def write_project(root):
    """Three runs, one of which goes on; checkpoints, one of them torn; a log."""
    now = time.time()
    write_run(f"{root}/vit-small/monitor/20261116-101500-ab12", "vit-small", start=now - 113, straggler=2, end=None, seed=1)
    write_run(f"{root}/vit-small/monitor/20261116-091200-77aa", "vit-small", steps=5200, rate=6e-4, start=now - 7200, seed=2)
    write_run(f"{root}/baseline/monitor/20261115-180000-0c1d", "baseline", ranks=2, steps=4200, rate=4e-4,
              start=now - 90000, end="failed", seed=3)
    for number in range(3):
        write_checkpoint(f"{root}/vit-small/checkpoints/checkpoint_{number}", now - 90 + 30 * number,
                         86_000_000 if number != 1 else 50_000_000)
    os.makedirs(f"{root}/vit-small/logs")
    with open(f"{root}/vit-small/logs/stdout.log", "w", encoding="utf-8") as file:
        for epoch in range(60):
            file.write(f"[default0]: epoch {epoch // 20} step {100 * epoch} loss {2.3 * math.exp(-epoch / 12) + 0.25:.4f}\n")


class Monitor:
    """The server over a folder."""

    def __init__(self, folder):
        self.process = subprocess.Popen([ACCELERATE, "monitor", folder, "--port", "0"], stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, text=True)
        self.address = self.process.stdout.readline().strip()

    def close(self):
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(20) == 0
        self.process.stdout.close()


INK = """(() => { const canvas = document.querySelector('#metric canvas');
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let colored = 0;
  for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3] > 100 && Math.abs(pixels[i] - pixels[i + 2]) > 60) colored++;
  return colored; })()"""


class MonitorInABrowser(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="monitor_")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def open(self, **size):
        monitor = Monitor(self.folder)
        self.addCleanup(monitor.close)
        browser = Browser(**size)
        self.addCleanup(browser.close)
        browser.open(monitor.address)
        browser.until("document.querySelectorAll('#metric canvas').length > 0")
        return browser

    def test_draws_curves_and_names_the_straggler(self):
        write_project(self.folder)
        browser = self.open()
        browser.until(INK + " > 500")
        self.assertIn("Rank 2 is the straggler", browser.run("document.getElementById('notices').innerText"))
        text = browser.run("document.querySelector('main').innerText.toLowerCase()")
        for word in ("train/loss", "learning rate", "samples/s", "waiting in collectives", "gpu utilisation", "damaged",
                     "complete", "86.0 mb", "batch_size", "epoch 2 step 5900"):
            self.assertIn(word, text)
        self.assertEqual(browser.run("document.querySelectorAll('#runs li').length"), 3)
        self.assertEqual(browser.errors, [])

    def test_follows_a_run_that_goes_on(self):
        run = f"{self.folder}/monitor/a"
        write_run(run, "a", ranks=1, steps=100, start=time.time() - 3, end=None)
        browser = self.open()
        browser.until("document.getElementById('link').innerText === 'live'")
        with open(f"{run}/rank_0.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), "step": 101, "values": {"train/loss": 42.5}}) + "\n")
        browser.until("document.getElementById('facts').innerText.includes('42.5')")

    def test_shows_names_as_text(self):
        run = f"{self.folder}/{EVIL.replace('/', '')}/monitor/a"
        os.makedirs(run)
        with open(f"{run}/rank_0.jsonl", "w", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), "start": {"rank": 0, "host": EVIL, "device": EVIL}}) + "\n")
            file.write(json.dumps({"time": time.time(), "name": EVIL, "config": {EVIL: EVIL}}) + "\n")
            file.write(json.dumps({"time": time.time(), "step": 1, "values": {EVIL: 1, "</script><script>evil=1": "NaN"}}) + "\n")
        with open(f"{self.folder}/{EVIL.replace('/', '')}.log", "w", encoding="utf-8") as file:
            file.write(EVIL + "\n")
        browser = self.open()
        browser.until("document.getElementById('log-text').innerText.includes('onerror')")
        self.assertIn(EVIL, browser.run("document.getElementById('metric').innerText"))
        self.assertIn(EVIL, browser.run("document.getElementById('config').innerText"))
        self.assertIsNone(browser.run("window.evil"))
        self.assertEqual(browser.run("document.images.length"), 0)
        self.assertEqual(browser.errors, [])

    def test_forbids_scripts_that_are_not_its_own(self):
        write_run(f"{self.folder}/monitor/a", "a", ranks=1, steps=100)
        browser = self.open()
        browser.run("(() => { const s = document.createElement('script'); s.textContent = 'window.evil = 1';"
                    "document.body.append(s); })()")
        self.assertIsNone(browser.run("window.evil"))

    def test_stays_smooth_with_a_million_points(self):
        run = f"{self.folder}/monitor/a"
        os.makedirs(run)
        with open(f"{run}/rank_0.jsonl", "w", encoding="utf-8") as file:
            for step in range(1_000_000):
                value = 9.0 if step == 777_777 else 2 * math.exp(-step / 2e5) + random.gauss(0, 0.05)
                file.write('{"time": %.3f, "step": %d, "values": {"loss": %.5f}}\n' % (1000 + step / 1000, step, value))
        browser = self.open()
        browser.until("state.read === 1", timeout=120)
        browser.until(INK + " > 150")
        # The highest of all points is there, and frames come while the pointer moves.
        self.assertEqual(browser.run("Math.max(...state.charts[0].lines[0].high)"), 9)
        frame = browser.run("""new Promise(done => { const times = []; let last = performance.now(), x = 0;
          const canvas = document.querySelector('#metric canvas');
          const next = now => { times.push(now - last); last = now; x += 5;
            canvas.dispatchEvent(new PointerEvent('pointermove', {clientX: canvas.getBoundingClientRect().left + x, clientY: 200}));
            if (times.length < 60) requestAnimationFrame(next); else done(times.sort((a, b) => a - b)[30]); };
          requestAnimationFrame(next); })""")
        self.assertLess(frame, 50)
        start = time.monotonic()
        browser.run("fetch('api/state?columns=800').then(answer => answer.text())")
        self.assertLess(time.monotonic() - start, 2)

    def test_obeys_the_keyboard_and_the_mouse(self):
        write_project(self.folder)
        browser = self.open()
        browser.key("x")
        browser.until("document.getElementById('axis-time').getAttribute('aria-pressed') === 'true'")
        browser.key("l")
        browser.until("document.getElementById('log').getAttribute('aria-pressed') === 'true'")
        browser.key("3")
        browser.until("state.runs.filter(run => run.shown).length === 2")
        first = browser.run("state.focus")
        browser.key("ArrowDown")
        browser.until(f"state.focus !== {first}")
        left, top = browser.run("(() => { const r = document.querySelector('#metric canvas').getBoundingClientRect();"
                                "return [r.left, r.top]; })()")
        browser.mouse("mousePressed", left + 100, top + 60, "left")
        browser.mouse("mouseMoved", left + 200, top + 60, "left")
        browser.mouse("mouseReleased", left + 200, top + 60, "left")
        browser.until("!document.getElementById('unzoom').hidden")
        browser.key("Escape")
        browser.until("document.getElementById('unzoom').hidden")
        self.assertEqual(browser.errors, [])

    def test_fits_a_phone_and_follows_the_size_of_its_window(self):
        write_project(self.folder)
        browser = self.open()
        for width in (1280, 390, 820, 1920):
            browser.resize(width, 800)
            browser.until(f"document.documentElement.clientWidth === {width}")
            browser.until("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
            browser.until("[...document.querySelectorAll('canvas')].every(canvas => canvas.width === Math.round(canvas.clientWidth * devicePixelRatio))")
            browser.until(INK + " > 300")

    def test_says_what_to_do_where_there_are_no_runs(self):
        monitor = Monitor(self.folder)
        self.addCleanup(monitor.close)
        browser = Browser()
        self.addCleanup(browser.close)
        browser.open(monitor.address)
        browser.until("document.getElementById('empty').innerText.includes('ACCELERATE_MONITOR=1')")


def take_pictures(folder):
    """dashboard.png for the documentation, and the whole page for a look at it."""
    with tempfile.TemporaryDirectory(prefix="monitor_") as project:
        write_project(project)
        monitor = Monitor(project)
        for name, width, scheme in (("dashboard", 1360, "light"), ("dark", 1360, "dark"), ("phone", 390, "light")):
            browser = Browser(width, 980)
            browser.scheme(scheme)
            browser.open(monitor.address)
            browser.until("document.querySelectorAll('#metric canvas').length > 0")
            browser.run("document.getElementById('folder').id = 'shown'")
            browser.run("document.getElementById('shown').textContent = '/home/me/runs'")
            time.sleep(0.7)
            browser.screenshot(f"{folder}/{name}.png", full=False)
            browser.resize(width, browser.run("document.documentElement.scrollHeight"))
            time.sleep(0.7)
            browser.screenshot(f"{folder}/{name}_whole.png", full=False)
            browser.close()
        monitor.close()


if __name__ == "__main__":
    if find() is None:
        print("skipped: there is no Chromium or Chrome in PATH (apt-get install chromium)")
        sys.exit(77)
    if PICTURES:
        take_pictures(PICTURES)
        sys.exit(0)
    unittest.main(argv=sys.argv[:1], verbosity=2)
