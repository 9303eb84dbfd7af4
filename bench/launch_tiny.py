"""Python's side of launch_tiny.cpp."""
import sys
import time

sys.stdout.write(f"reached main {time.monotonic() * 1e3:.3f}\n")
