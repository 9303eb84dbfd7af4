"""launches.py BENCH OURS PYTHON: from the command to its workers, ours and Python's in turns.

Writes "name<tab>value<tab>unit" lines for compare.py. A time is that of the later of two ranks.
"""
import os
import re
import subprocess
import sys
import time

bench, ours_path, python_path = sys.argv[1:]
here = os.path.dirname(os.path.abspath(__file__))
accelerate = os.path.join(os.path.dirname(bench), "bin", "accelerate")
python_bin = os.path.dirname(sys.executable)
environment = dict(os.environ, ACCELERATE_USE_CPU="1", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="",
                   PYTHON_EXEC=sys.executable)
rounds = 3

our_launch = [accelerate, "launch", "--quiet", "--cpu", "--num_processes", "2", "--main_process_port", "0"]
torchrun = [os.path.join(python_bin, "torchrun"), "--standalone", "--nproc_per_node", "2"]
# --multi_gpu is the mode in which Python's launcher starts several processes.
python_launch = [os.path.join(python_bin, "accelerate"), "launch", "--multi_gpu", "--num_processes", "2",
                 "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
                 "--main_process_port", "0"]
native = [os.path.join(bench, "bench_launch")]
script = [os.path.join(here, "launch.py")]
# A program that does nothing but say that it is there, natively and in Python.
tiny = [os.path.join(bench, "bench_launch_tiny")]
tiny_script = [os.path.join(here, "launch_tiny.py")]


def run(command):
    """Milliseconds from the start of the command to each point that ranks report."""
    begin = time.monotonic() * 1e3
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    whole = time.monotonic() * 1e3 - begin
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {result.returncode}:\n{result.stdout}{result.stderr}")
    reached = {"end": whole}
    for line in re.findall(r"reached ([a-z0-9. ]*)", result.stdout):
        words = line.split()
        for point, when in zip(words[::2], words[1::2]):
            reached[point] = max(reached.get(point, 0), float(when) - begin)
    return reached


def note(path, name, value):
    with open(path, "a") as file:
        file.write(f"{name}\t{value}\tms\n")


def compare_programs():
    ours = run(our_launch + native)
    ours_of_python = run(our_launch + script)
    for name, command in (("torchrun", torchrun), ("accelerate launch", python_launch)):
        theirs = run(command + script)
        for label, point in (("first line of main", "main"), ("group ready", "group")):
            note(ours_path, f"{label} / {name}", ours[point])
            note(python_path, f"{label} / {name}", theirs[point])
            note(ours_path, f"{label}, a script / {name}", ours_of_python[point])
            note(python_path, f"{label}, a script / {name}", theirs[point])


def own_part():
    """What the launcher adds: to the first line of a program that starts at once."""
    ours = run(our_launch + tiny)["main"] - run(tiny)["main"]
    theirs = run(torchrun + tiny_script)["main"] - run([sys.executable] + tiny_script)["main"]
    note(ours_path, "the launcher's own part", ours)
    note(python_path, "the launcher's own part", theirs)


def help_text():
    """More than a program that does nothing."""
    nothing = min(run(["/bin/true"])["end"] for _ in range(5))
    note(ours_path, "launch --help, beyond /bin/true", min(run([accelerate, "launch", "--help"])["end"]
                                                           for _ in range(5)) - nothing)
    note(python_path, "launch --help, beyond /bin/true", run([python_launch[0], "launch", "--help"])["end"] - nothing)


for _ in range(rounds):
    compare_programs()
    own_part()
    help_text()
