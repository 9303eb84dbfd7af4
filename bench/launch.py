"""Python Accelerate's side of launch.cpp."""
import sys
import time

main_ms = time.monotonic() * 1e3  # before anything is imported, to be fair

from accelerate import PartialState  # noqa: E402

state = PartialState(cpu=True)
state.wait_for_everyone()
# One write: print() writes the line and its end one by one, and ranks get in between.
sys.stdout.write(f"reached main {main_ms:.3f} group {time.monotonic() * 1e3:.3f}\n")
sys.stdout.flush()
state.destroy_process_group()
