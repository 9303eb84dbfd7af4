"""What torch.utils.tensorboard writes: writes events.json beside this file, with each event as the bytes of its record."""
# needs: tensorboard

import json
import pathlib
import tempfile

import numpy
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter, summary

WALLTIME = 1000.0


def record(event):
    """The event as it stands in a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "events")
        with path.open("wb") as file:
            RecordWriter(file).write(event.SerializeToString(deterministic=True))
        return path.read_bytes().hex()


def of_summary(value, step=None):
    return record(Event(wall_time=WALLTIME, step=step, summary=value))


with tempfile.TemporaryDirectory() as folder:
    bins = SummaryWriter(folder).default_bins

histograms = {"one": [7.0], "signs": [-1e-9, 0.0, 1e-9], "several": [0.5, 0.5, 2.9, 3.0, 17.0]}
cases = {
    "version": record(Event(wall_time=WALLTIME, file_version="brain.Event:2")),
    "scalar": of_summary(summary.scalar("loss", 0.5), 7),
    "scalar_without_step": of_summary(summary.scalar("train/loss", 0.1)),
    "scalar_zero": of_summary(summary.scalar("zero", 0.0), 1 << 40),
    "text": of_summary(summary.text("note", "grüß Gott"), 3),
    "histograms": {
        tag: {"values": values, "record": of_summary(summary.histogram(tag, numpy.array(values), bins), 2)}
        for tag, values in histograms.items()
    },
    # A map has no order in a message: one entry each.
    "hparams": [
        {"name": name, "value": value, "records": [of_summary(part) for part in summary.hparams({name: value, "none": None}, {})]}
        for name, value in {"lr": 0.1, "layers": 12, "bias": True, "kind": "tiny"}.items()
    ],
}
pathlib.Path(__file__).with_name("events.json").write_text(json.dumps(cases, indent=0) + "\n")
