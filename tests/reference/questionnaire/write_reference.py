"""Writes what `accelerate config` of Python Accelerate writes for given answers: cases.json, a list of
{"name", "answers", "yaml", "json"}; "error" instead of the files where it refuses the answers.

An answer is one line: the number of a choice for a menu, the text for any other question.

    python tests/reference/questionnaire/write_reference.py
"""

import json
import os
import pathlib
import random
import tempfile
from unittest import mock

from accelerate.commands.config import cluster, config, config_utils

HOME = "/home/user"
TEXTS = ["BertLayer,T5Block", "none", "/data/a b", "no", "10.0.0.1", "0", "1e5", "node-1: x", "~/hosts"]
# Misspelled in Python's table, which refuses it for that.
TORCHXLA = 11


class OutOfAnswers(Exception):
    pass


class Answers:
    """Answers from a list, or made up as the questions come; `used` are those that were asked for."""

    def __init__(self, answers=None, seed=None):
        self.given = list(answers) if answers is not None else None
        self.random = random.Random(seed)
        self.used = []

    def take(self, make):
        if self.given is None:
            answer = make()
        elif self.given:
            answer = self.given.pop(0)
        else:
            raise OutOfAnswers(self.used)
        self.used.append(answer)
        return answer

    def choose(self, text, options=[], convert=None, default=0):
        def make():
            # The machine and the environment that lead on are more likely than those that are refused.
            if "compute environment" in text:
                return "0"
            if "type of machine" in text:
                return str(self.random.choice([0, 0, 1, 1, 4, 4, 4, 4, 2, 3, 5, 6, 7, 8, 9]))
            if "dynamo backend" in text:
                return str(self.random.choice([i for i in range(len(options)) if i != TORCHXLA]))
            return str(self.random.randrange(len(options)))

        index = int(self.take(make))
        return convert(index) if convert is not None else index

    def input(self, convert, default):
        r = self.random
        if default is not None and r.random() < 0.25:
            return ""
        if convert is config_utils._convert_yes_no_to_bool:
            return r.choice(["yes", "no", "YES", "No"])
        if convert is int:
            return str(r.choice([1, 2, 3, 8]))
        if convert is float:
            return r.choice(["0.5", "2", "1e-3", "0"])
        return r.choice(TEXTS)

    def ask(self, text, convert=None, default=None, error_message=None):
        answer = self.take(lambda: self.input(convert, default))
        if default is not None and answer == "":
            return default
        return convert(answer) if convert is not None else answer


def run(answers):
    """The files that Python writes, or its error."""
    present = dict.fromkeys(["deepspeed", "fp8", "msamp", "torchao", "transformer_engine", "transformers"], True)
    absent = dict.fromkeys(["hpu", "mlu", "mps", "musa", "neuron", "npu", "sdaa", "xpu"], False)
    patches = [mock.patch.object(cluster, f"is_{name}_available", lambda value=value: value)
               for name, value in {**present, **absent}.items()]
    for module in (cluster, config):
        patches += [mock.patch.object(module, "_ask_field", answers.ask), mock.patch.object(module, "_ask_options", answers.choose)]
    patches.append(mock.patch.dict(os.environ, {"HOME": HOME}))
    for patch in patches:
        patch.start()
    try:
        asked = config.get_user_input()
    except OutOfAnswers:
        raise
    except Exception as error:
        return {"error": type(error).__name__}
    finally:
        mock.patch.stopall()
    assert not answers.given, f"not asked for: {answers.given}"
    files = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("yaml", "json"):
            path = pathlib.Path(folder) / f"config.{kind}"
            getattr(asked, f"to_{kind}_file")(str(path))
            files[kind] = path.read_text()
    return files


CASES = {
    "defaults": ["0", "0", "", "", "", "", "", "0"],
    "cpu": ["0", "0", "yes", "no", "no", "2"],
    "multi_cpu_mpi": ["0", "1", "2", "1", "10.0.0.1", "29500", "yes", "no", "yes", "", "no", "8", "2"],
    "multi_gpu": ["0", "4", "", "no", "no", "no", "no", "no", "2", "0,1", "yes", "1"],
    "two_networks": ["0", "4", "2", "0", "node-1", "29501", "no", "c10d", "yes", "no", "no", "no", "no", "16", "", "no", "2"],
    "dynamo": ["0", "0", "no", "yes", "2", "yes", "1", "yes", "no", "yes", "no", "all", "no", "0"],
    "deepspeed_file": ["0", "4", "1", "no", "no", "yes", "yes", "/etc/ds.json", "no", "no", "4"],
    "deepspeed_3": ["0", "4", "1", "no", "no", "yes", "no", "3", "2", "2", "/n1", "/n2", "4", "yes", "0.5", "yes", "yes", "yes",
                    "MixtralSparseMoeBlock", "8", "2"],
    "deepspeed_hosts": ["0", "4", "2", "0", "10.0.0.1", "29500", "yes", "no", "no", "yes", "no", "1", "1", "no", "no", "no", "0",
                        "hosts", "yes", "worker-1", "yes", "worker-2", "8", "1"],
    "fsdp_1": ["0", "4", "1", "no", "no", "no", "yes", "0", "3", "no", "0", "no", "BertLayer", "0", "2", "no", "yes", "no", "yes", "yes",
               "4", "2"],
    "fsdp_2": ["0", "4", "1", "no", "no", "no", "yes", "1", "", "no", "1", "", "0", "", "", "no", "4", "2"],
    "parallelism": ["0", "4", "1", "no", "no", "no", "yes", "1", "no", "yes", "2", "1", "no", "yes", "yes", "2", "2", "1", "2", "1", "8",
                    "2"],
    "megatron": ["0", "4", "1", "no", "no", "no", "no", "yes", "2", "yes", "2", "4", "no", "yes", "0", "8", "2"],
    "fp8_te": ["0", "0", "no", "no", "no", "all", "no", "3", "1", "yes", "1", "2", "1", "16", "1", "yes", "yes", "no", "yes"],
    "fp8_te_plain": ["0", "0", "no", "no", "no", "all", "no", "3", "1", "", "", "", "0", "", "0", "no"],
    "fp8_msamp": ["0", "0", "no", "no", "no", "all", "no", "3", "2", "0"],
    "fp8_ao": ["0", "0", "no", "no", "no", "all", "no", "3", "0", "no", "yes"],
    "one_gpu_as_multi_gpu": ["0", "4", "1", "no", "no", "no", "no", "no", "1"],
    "neuron_deepspeed": ["0", "9", "1", "no", "no", "yes"],
}


def main():
    cases = []
    for name, given in CASES.items():
        answers = Answers(given)
        cases.append({"name": name, **run(answers), "answers": answers.used})
    for seed in range(60):
        answers = Answers(seed=seed)
        cases.append({"name": f"seed_{seed}", **run(answers), "answers": answers.used})
    path = pathlib.Path(__file__).parent / "cases.json"
    path.write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
