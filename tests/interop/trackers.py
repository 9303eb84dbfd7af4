"""trackers.py PROGRAM: the real packages read what interop_trackers writes."""

import gzip
import http.server
import io
import json
import math
import os
import pathlib
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import zlib

import numpy

program = sys.argv[1]
config = {"lr": 0.1, "layers": 3, "deep": True, "kind": "tiny"}


def run(name, folder, **environment):
    """What the program prints: the folder or the id of the run."""
    return subprocess.run([program, name, folder], check=True, stdout=subprocess.PIPE, text=True, cwd=folder,
                          env={**os.environ, **environment}).stdout


def check_losses(values):
    assert len(values) == 101, len(values)
    for step, value in enumerate(values[:100]):
        assert math.isclose(value, 1 / (1 + step), rel_tol=1e-6), (step, value)
    assert math.isnan(values[100])


def tensorboard(folder):
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    run("tensorboard", folder)
    project = pathlib.Path(folder, "project")
    events = EventAccumulator(str(project), size_guidance={"scalars": 0, "images": 0})
    events.Reload()
    check_losses([scalar.value for scalar in events.Scalars("loss")])
    assert [scalar.step for scalar in events.Scalars("train/acc")] == list(range(100))
    text = events.Tensors("note/text_summary")[0].tensor_proto.string_val[0]
    assert text.decode() == "grüß Gott", text
    assert events.SummaryMetadata("note/text_summary").plugin_data.plugin_name == "text"
    pixels = numpy.array(Image.open(io.BytesIO(events.Images("images")[0].encoded_image_string)))
    first = (3 * numpy.arange(18, dtype=numpy.uint8)).reshape(2, 3, 3)
    assert numpy.array_equal(pixels, numpy.concatenate([first, first + 0x40], axis=1)), pixels
    histogram = events.Histograms("values")[0].histogram_value
    assert (histogram.min, histogram.max, histogram.num, histogram.sum) == (-2, 3, 5, 2)
    assert sum(histogram.bucket) == 5 and len(histogram.bucket) == len(histogram.bucket_limit)
    for key, value in {"both_a": 1, "both_b": 2.5}.items():
        curve = EventAccumulator(str(project / key))
        curve.Reload()
        assert curve.Scalars("both")[0].value == value
    (session,) = [path.parent for path in project.glob("*/hparams.yml")]
    hparams = EventAccumulator(str(session))
    hparams.Reload()
    content = hparams.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    stored = {key: getattr(value, value.WhichOneof("kind")) for key, value in start.hparams.items()}
    assert stored == config, stored


def check_mlflow(client, run_id):
    (experiment,) = client.search_experiments(filter_string="name = 'project'")
    found = client.get_run(run_id)
    assert found.info.experiment_id == experiment.experiment_id
    assert found.info.status == "FINISHED", found.info
    assert found.data.params == {key: str(value) for key, value in config.items()}, found.data.params
    history = sorted(client.get_metric_history(run_id, "loss"), key=lambda metric: metric.step)
    check_losses([metric.value for metric in history])
    assert len(client.get_metric_history(run_id, "train/acc")) == 100
    assert found.data.tags["team"] == "a"
    assert found.info.run_id in [each.info.run_id for each in client.search_runs([experiment.experiment_id])]


def mlflow_folder(folder):
    from mlflow import MlflowClient

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    uri = f"file://{folder}/mlruns"
    check_mlflow(MlflowClient(uri), run("mlflow", folder, MLFLOW_TRACKING_URI=uri, MLFLOW_TAGS='{"team": "a"}'))


def mlflow_server(folder):
    from mlflow import MlflowClient

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{free.getsockname()[1]}"
    with open(f"{folder}/log", "w") as log:
        server = subprocess.Popen([sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"{folder}/store", "--workers", "1",
                                   "--host", "127.0.0.1", "--port", uri.rsplit(":", 1)[1]], stdout=log, stderr=log,
                                  env={**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true"})
    try:
        for _ in range(1500):
            try:
                urllib.request.urlopen(f"{uri}/health", timeout=5)
                break
            except OSError:
                assert server.poll() is None, pathlib.Path(folder, "log").read_text()
                time.sleep(0.2)
        check_mlflow(MlflowClient(uri), run("mlflow", folder, MLFLOW_TRACKING_URI=uri, MLFLOW_TAGS='{"team": "a"}'))
    finally:
        server.terminate()
        server.wait()


def wandb_records(path):
    """The messages of an offline run, as the client's own protocol files read them."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:7] == b":W&B\xe1\xbe\0"
    position, message = 7, b""
    while position < len(data):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        checksum, size, kind = struct.unpack_from("<IHB", data, position)
        part = data[position + 7 : position + 7 + size]
        assert zlib.crc32(bytes([kind]) + part) == checksum
        position += 7 + size
        message += part
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(message)
            message = b""


class WandbServer(http.server.BaseHTTPRequestHandler):
    """As much of the server of Weights & Biases as `wandb sync` needs."""

    history, uploads, config = [], {}, None

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        answer = {}
        if not self.path.endswith(("/file_stream", "/graphql")):  # reports of the client's own
            return self.reply(b"{}")
        request = json.loads(body)
        if self.path.endswith("/file_stream"):
            WandbServer.history += request.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
        elif "UpsertBucket" in request["query"]:
            WandbServer.config = json.loads(request["variables"].get("config") or "{}")
            project = {"name": "project", "entity": {"name": "me"}}
            answer = {"upsertBucket": {"bucket": {"id": "1", "name": request["variables"]["name"], "project": project}, "inserted": True}}
        elif "CreateRunFiles" in request["query"]:
            files = [{"name": name, "uploadUrl": f"http://{self.headers['Host']}/{name}"} for name in request["variables"]["files"]]
            answer = {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        self.reply(json.dumps({"data": answer}).encode())

    def do_PUT(self):
        WandbServer.uploads[self.path[1:]] = self.rfile.read(int(self.headers["Content-Length"]))
        self.reply(b"")

    def reply(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def wandb_sync(folder):
    where = pathlib.Path(folder, run("wandb", folder, WANDB_DIR=folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), WandbServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {"WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}", "WANDB_API_KEY": 40 * "a", "WANDB_DIR": folder}
    done = subprocess.run([sys.executable, "-m", "wandb", "sync", where], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=300, env={**os.environ, **environment})
    server.shutdown()
    assert done.returncode == 0, done.stdout
    rows = {row["_step"]: row for row in map(json.loads, WandbServer.history)}
    check_losses([float(rows[step]["loss"]) for step in range(101)])
    assert rows[101]["both"] == {"a": 1, "b": 2.5} and len(rows[104]["large"]) == 100_000
    assert {key: WandbServer.config[key]["value"] for key in config} == config, WandbServer.config
    summary = json.loads(WandbServer.uploads["wandb-summary.json"])
    assert summary["train/acc"] == 99 and summary["note"] == "grüß Gott", summary
    media = [name for name in WandbServer.uploads if name.startswith("media/")]
    assert len(media) == 3 and all(WandbServer.uploads[name] == (where / "files" / name).read_bytes() for name in media), media


def wandb(folder):
    from PIL import Image

    where = pathlib.Path(folder, run("wandb", folder, WANDB_DIR=folder))
    records = list(wandb_records(next(where.glob("*.wandb"))))
    kinds = [record.WhichOneof("record_type") for record in records]
    assert kinds[:3] == ["header", "run", "config"] and kinds[-1] == "exit", kinds
    assert records[1].run.project == "project"
    assert {item.key: json.loads(item.value_json) for item in records[2].config.update} == config
    rows = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            row = {item.key: json.loads(item.value_json) for item in record.history.item}
            assert row["_step"] == record.history.step.num
            rows[row["_step"]] = row
    check_losses([rows[step]["loss"] for step in range(101)])
    assert rows[101]["both"] == {"a": 1, "b": 2.5} and rows[101]["note"] == "grüß Gott"
    images = rows[102]["images"]
    for name in images["filenames"]:
        assert Image.open(where / "files" / name).size == (images["width"], images["height"]) == (3, 2)
    table = json.loads((where / "files" / rows[103]["table"]["path"]).read_text())
    assert table == {"columns": ["x", "y"], "data": [[1, "a"], [2.5, None]]}
    assert len(rows[104]["large"]) == 100_000
    saved = [file.path for record in records for file in record.files.files]
    assert all((where / "files" / path).exists() for path in saved) and len(saved) == 3


def trackio(folder):
    os.environ["TRACKIO_DIR"] = folder
    run("trackio", folder)
    from trackio import fragments
    from trackio.sqlite_storage import SQLiteStorage

    assert fragments.import_inbox_dir() == 101
    (name,) = SQLiteStorage.get_runs("project")
    logs = SQLiteStorage.get_logs("project", name)
    check_losses([float(entry["loss"]) for entry in logs])
    stored = SQLiteStorage.get_run_config("project", name)
    assert {key: stored[key] for key in config} == config, stored


for check in (tensorboard, mlflow_folder, mlflow_server, wandb, wandb_sync, trackio):
    with tempfile.TemporaryDirectory() as work:
        check(work)
    print(f"{check.__name__}: read by the real package")
