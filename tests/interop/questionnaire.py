"""questionnaire.py ACCELERATE REFERENCE: random answers for `accelerate config`, given to Python and to the native command."""
import collections
import contextlib
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile

from accelerate.commands.config.config_args import load_config_from_file

tool, reference = sys.argv[1], pathlib.Path(sys.argv[2])
spec = importlib.util.spec_from_file_location("write_reference", reference / "questionnaire" / "write_reference.py")
python = importlib.util.module_from_spec(spec)
spec.loader.exec_module(python)

folder = pathlib.Path(tempfile.mkdtemp())
kinds = collections.Counter()
for seed in range(1000, 1300):
    answers = python.Answers(seed=seed)
    with contextlib.redirect_stdout(None):
        expected = python.run(answers)
    stdin = "".join(f"{answer}\n" for answer in answers.used)
    for kind in ("yaml", "json"):
        path = folder / f"ours.{kind}"
        path.unlink(missing_ok=True)
        done = subprocess.run([tool, "config", "--config_file", path], input=stdin, capture_output=True, text=True,
                              env={**os.environ, "HOME": python.HOME})
        if "error" in expected:
            assert done.returncode == 2 and not path.exists(), f"seed {seed}: Python refuses {answers.used}, we do not:\n{done.stdout}"
            continue
        assert done.returncode == 0, f"seed {seed}, {answers.used}:\n{done.stdout}\n{done.stderr}"
        if path.read_text() != expected[kind]:
            sys.exit(f"seed {seed}, {answers.used}: written differently.\nPython:\n{expected[kind]}\nours:\n{path.read_text()}")
        theirs = folder / f"theirs.{kind}"
        theirs.write_text(expected[kind])
        assert load_config_from_file(str(path)) == load_config_from_file(str(theirs))
        update = subprocess.run([tool, "config", "update", "--config_file", theirs], capture_output=True, text=True)
        assert update.returncode == 0, update.stderr
        assert theirs.read_text() == expected[kind], f"seed {seed}: `config update` changes a file of Python"
    kinds["refused" if "error" in expected else load_config_from_file(str(folder / "ours.yaml")).distributed_type.value] += 1
assert len(kinds) > 12, kinds
print("files are identical in both directions:", dict(kinds))
